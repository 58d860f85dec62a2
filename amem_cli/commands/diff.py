"""`amem diff`: where two states part, and what they share. Reads pages and manifests only, and writes nothing."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_cli.shell.options import Call, command, new_app
from amem_cli.shell.output import digest, human_size
from kvstore.naming import parse_ref

if TYPE_CHECKING:
    from kvstore.history.diff import Difference, Side
    from kvstore.store import Store

app = new_app()

_DIGITS = 12


@command(app)
def diff(
    call: Call,
    a: Annotated[
        str, typer.Argument(metavar="A", help="A state: AGENT, AGENT@SNAPSHOT, AGENT~N, AGENT@sha256:PREFIX.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The state to hold against it.")],
    text: Annotated[bool, typer.Option("--text", help="Both sides' text from where they part.")] = False,
) -> None:
    """Show where two states part, what they share, and what computed them."""
    from kvstore.history.diff import compare

    ref_a, ref_b = parse_ref(a), parse_ref(b)
    store = call.open_store()
    found = compare(store, store.resolve(ref_a), store.resolve(ref_b))
    texts = _texts(call, store, found) if text else (None, None)
    _print(call, found)
    for side, said in zip((found.a, found.b), texts, strict=True):
        if said is not None:
            call.out.print(f"--- {side.state.ref}\n{said}")
    call.out.result(
        call.command,
        common_tokens=found.common_tokens,
        parted_at=found.parted_at,
        shared_blocks=found.shared_blocks,
        shared_bytes=found.shared_bytes,
        model_parts={part: list(pair) for part, pair in found.model_parts.items()},
        same_codec=found.a.codec == found.b.codec,
        a=_fields(found.a, texts[0]),
        b=_fields(found.b, texts[1]),
    )


def _texts(call: Call, store: "Store", found: "Difference") -> tuple[str, str]:
    from amem_cli.views.text import Decoder
    from kvstore.history.diff import tokens_from

    decoder = Decoder(call)
    manifests = found.a.state.manifest, found.b.state.manifest
    first, second = (decoder.text(m.model, tokens_from(store, m, found.common_tokens)) for m in manifests)
    return first, second


def _fields(side: "Side", text: str | None) -> dict[str, Any]:
    manifest, turn = side.state.manifest, side.turn
    return {
        "ref": str(side.state.ref),
        "state": digest(side.state.digest),
        "domain": manifest.domain,
        "model": manifest.model.name,
        "codec": side.codec.name,
        "tokens": manifest.tokens,
        "own_blocks": side.blocks,
        "own_bytes": side.bytes,
        "turn": turn and {"index": turn.index, "role": turn.role, "label": turn.label},
        **({} if text is None else {"text": text}),
    }


def _print(call: Call, found: "Difference") -> None:
    out = call.out
    if found.parted_at is None:
        out.print(f"tokens     the same {found.common_tokens}")
    else:
        out.print(f"tokens     {found.common_tokens} in common; they part at token {found.parted_at}")
    out.print(f"shared     {found.shared_blocks} blocks, {human_size(found.shared_bytes)}")
    for side in (found.a, found.b):
        own = f"{side.blocks} blocks of its own, {human_size(side.bytes)}"
        out.print(f"{side.state.ref!s:<10} {side.state.manifest.tokens} tokens, {own}{_turn(side)}")
    for part, pair in found.model_parts.items():
        a, b = (value[:_DIGITS] if value else "none" for value in pair)
        out.print(f"model      {part} differs: {a}, {b}")
    if found.a.codec != found.b.codec:
        out.print(f"codec      {found.a.codec.name}, {found.b.codec.name}")


def _turn(side: "Side") -> str:
    if side.turn is None:
        return ""
    label = f" ({side.turn.label})" if side.turn.label else ""
    return f"; goes on in turn {side.turn.index}, {side.turn.role}{label}"
