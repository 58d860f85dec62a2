"""`amem chat`: one turn of an agent, streamed; without a message on a terminal, one turn after another."""

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

Message = Annotated[str | None, typer.Argument(metavar="MESSAGE", help="The message; - reads standard input.")]
MessageFiles = Annotated[
    list[str] | None, typer.Option("-f", "--file", metavar="FILE", help="Text appended to the message.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temp", metavar="T", min=0, help="0 picks the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", metavar="P", min=0, max=1, help="Nucleus sampling.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Makes sampling repeatable.")]
StopTexts = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer at this text.")]
NoSave = Annotated[bool, typer.Option("--no-save", help="Answer without saving anything.")]


@command(app)
def chat(
    call: Call,
    ref: State,
    message: Message = None,
    file: MessageFiles = None,
    max_tokens: MaxTokens = 256,
    temp: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: StopTexts = None,
    no_save: NoSave = False,
    expect: Expect = None,
    wait: Wait = DEFAULT_WAIT,
    model: ModelName = None,
) -> None:
    """Send a message to an agent. Without a message on a terminal, converse until Ctrl-D."""
    state = _check_state(ref, no_save)
    converse = message is None and not file and interactive()
    if converse and (call.out.json or no_save):
        raise UsageError("no message given", "with --json or --no-save, chat takes one message")
    text = "" if converse else chat_text(message, file or [])
    stops = tuple(check_text(part, "--stop") for part in stop or [])

    store = call.open_store()
    entry = turns.choose_model(call, model, store, store.resolve(state).agent)
    engine = turns.load_engine(call, store, entry)
    from amem_cli.engine.turns.requests import Generation

    chatting = _Chat(call, engine, Generation(max_tokens, temp, top_p, seed, stops), save=not no_save, wait=wait)
    if converse:
        _converse(chatting, state, expect)
        return
    result, received = chatting.turn(state, text, expect)
    fields = turns.json_fields(result) | turns.answer_fields(result)
    call.out.result(call.command, ok=not received(), **fields)
    received.finish()


def _check_state(ref: str, no_save: bool) -> Ref:
    """The state that `ref` names. Raises UsageError if its answer could not be saved."""
    state = parse_ref(ref)
    if not (no_save or state.is_head):
        hint = f"continue it with `amem fork {state} NEW`, or chat with --no-save"
        raise UsageError(f"{state} is not the head of {state.agent}", hint)
    return state


def _converse(chatting: "_Chat", state: Ref, expect: str | None) -> None:
    """One turn after another, with the model kept loaded. Ctrl-C ends an answer, and at the prompt the conversation."""
    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys in `input`; the history is written to no file)
    while (text := _read_message()) is not None:
        if not text:
            continue
        try:
            _, received = chatting.turn(state, text, expect)
        except AmemError as error:
            chatting.call.out.error(error)
            continue
        if received.signum != signals.INTERRUPT:
            received.finish()
        state, expect = Ref(state.agent), None


def _read_message() -> str | None:
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
class _Chat:
    """How the turns of this command run."""

    call: Call
    engine: "Engine"
    generation: "Generation"
    save: bool
    wait: float
    warned: bool = False  # about a model without a chat template

    def turn(self, state: Ref, text: str, expect: str | None) -> tuple["TurnResult", signals.Stop]:
        """Answer `text`, streamed. Returns the turn, and the signal that ended it, if one did."""
        from amem_cli.engine.prompt.transcript import Text
        from amem_cli.engine.turns.requests import ChatOptions, Watcher

        out = self.call.out
        with signals.listening() as stop, out.progress("prefill") as bar:

            def stream(piece: str) -> None:
                bar.close()
                try:
                    out.piece(piece)
                except BrokenPipeError:
                    stop.request(signals.CLOSED, None)

            result = self.engine.chat(
                state,
                [Text(text)],
                self.generation,
                ChatOptions(self.save, expect, self.wait),
                Watcher(
                    on_text=stream,
                    on_progress=lambda at: bar.update(at.done, at.total, at.tokens_per_second),
                    should_stop=stop,
                ),
            )
            stream("\n")
        turns.print_summary(out, result)
        if not result.template and not self.warned:
            out.warn(f"{result.model} has no chat template: it continues the text instead of answering")
            self.warned = True
        return result, stop
