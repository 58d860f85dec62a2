"""`amem chat`: one turn of an agent, streamed; without a message on a terminal, turn after turn."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli import turns
from amem_cli.shell import signals
from amem_cli.shell.inputs import chat_text, check_text, interactive
from amem_cli.shell.options import DEFAULT_WAIT, Call, Expect, ModelName, State, Wait, command, new_app
from kvstore.errors import AmemError, UsageError
from kvstore.naming import Ref, parse_ref

if TYPE_CHECKING:
    from amem_cli.engine.turns.engine import Engine
    from amem_cli.engine.turns.requests import Generation, TurnResult

app = new_app()


@command(app)
def chat(
    call: Call,
    ref: State,
    message: Annotated[str | None, typer.Argument(metavar="MESSAGE", help="What to say; - reads stdin.")] = None,
    file: Annotated[list[str] | None, typer.Option("-f", "--file", metavar="FILE", help="Text after it.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="The longest answer.")] = 256,
    temp: Annotated[float, typer.Option("--temp", metavar="T", min=0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", metavar="P", min=0, max=1, help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Repeats a sampled answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer there.")] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Answer, and leave no trace.")] = False,
    expect: Expect = None,
    wait: Wait = DEFAULT_WAIT,
    model: ModelName = None,
) -> None:
    """Say something to an agent. Without a message on a terminal, talk with it until Ctrl-D."""
    state = parse_ref(ref)
    if not (no_save or state.is_head):
        raise UsageError(
            f"{state} is not the head of {state.agent}", f"`amem fork {state} NEW`, or chat with --no-save"
        )
    talk = message is None and not file and interactive()
    if talk and (call.out.json or no_save):
        raise UsageError("there is no message", "with --json and --no-save, chat takes one message")
    text = "" if talk else chat_text(message, file or [])
    stops = tuple(check_text(part, "--stop") for part in stop or [])

    store = call.open_store()
    agent = store.resolve(state).agent
    entry = turns.choose_model(call, model, store, agent)
    engine = turns.load_engine(call, store, entry)
    from amem_cli.engine.turns.requests import Generation

    generation = Generation(max_tokens, temp, top_p, seed, stops)
    turn = _Turn(call, engine, generation, save=not no_save, wait=wait)
    if talk:
        _talk(turn, state, expect)
    else:
        result, heard = turn.run(state, text, expect)
        more = {"text": result.text, "finish": result.finish, "seed": result.seed, "temp": result.temp}
        call.out.result(call.command, ok=not heard(), **turns.fields(result), **more)
        heard.finish()


def _talk(turn: "_Turn", state: Ref, expect: str | None) -> None:
    """Turn after turn, with the model kept loaded. Ctrl-C ends an answer, and at the prompt the conversation."""
    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys in `input`; what was typed is written to no file)
    while (text := _ask()) is not None:
        if not text:
            continue
        try:
            _, heard = turn.run(state, text, expect)
        except AmemError as error:
            turn.call.out.error(error)
            continue
        if heard.signum != signals.INTERRUPT:
            heard.finish()
        state, expect = Ref(state.agent), None


def _ask() -> str | None:
    """A line from the terminal, or None at the end of the conversation."""
    try:
        if sys.stdout.isatty():
            return check_text(input("> "), "the message")
        sys.stderr.write("> ")
        sys.stderr.flush()
        return check_text(input(), "the message")
    except (EOFError, KeyboardInterrupt):
        sys.stderr.write("\n")
        return None


@dataclass
class _Turn:
    """One turn after another of the same conversation."""

    call: Call
    engine: "Engine"
    generation: "Generation"
    save: bool
    wait: float
    told: bool = False  # that the model has no template

    def run(self, state: Ref, text: str, expect: str | None) -> tuple["TurnResult", signals.Stop]:
        """Answer `text`, streamed. Returns the turn, and which signal ended it, if one did."""
        from amem_cli.engine.prompt.transcript import Text
        from amem_cli.engine.turns.requests import ChatOptions, Watcher

        out = self.call.out
        with signals.listening() as heard, out.progress("prefill") as bar:

            def stream(piece: str) -> None:
                bar.close()
                try:
                    out.piece(piece)
                except BrokenPipeError:
                    heard.hear(signals.CLOSED, None)

            result = self.engine.chat(
                state,
                [Text(text)],
                self.generation,
                ChatOptions(self.save, expect, self.wait),
                Watcher(
                    on_text=stream,
                    on_progress=lambda at: bar.update(at.done, at.total, at.tokens_per_second),
                    should_stop=heard,
                ),
            )
            stream("\n")
        turns.tell(out, result)
        if not result.template and not self.told:
            out.warn(f"{result.model} has no chat template: text is continued, not answered")
            self.told = True
        return result, heard
