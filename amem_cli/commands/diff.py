"""`amem diff`: where two states diverge, and what they share. Reads pages and manifests only, and writes nothing."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_cli.shell.options import Call, command, new_app
from amem_cli.shell.output import counted, digest, human_size
from kvstore.format.kinds import BLOCK
from kvstore.naming import parse_ref

if TYPE_CHECKING:
    from kvstore.history.diff import Difference, Side
    from kvstore.store import Store

app = new_app()

_DIGITS = 12


@command(app)
def diff(
    call: Call,
    a: Annotated[str, typer.Argument(metavar="A", help="AGENT, AGENT@SNAPSHOT, AGENT~N or AGENT@sha256:PREFIX.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The state to compare with A.")],
    text: Annotated[bool, typer.Option("--text", help="Show both texts from the point of divergence.")] = False,
) -> None:
    """Show where two states diverge, what they share and which models computed them."""
    from kvstore.history.diff import compare

    ref_a, ref_b = parse_ref(a), parse_ref(b)
    store = call.open_store()
    difference = compare(store, store.resolve(ref_a), store.resolve(ref_b))
    texts = _texts(call, store, difference) if text else (None, None)
    _print(call, difference)
    for side, decoded in zip((difference.a, difference.b), texts, strict=True):
        if decoded is not None:
            call.out.print(f"--- {side.state.ref}\n{decoded}")
    call.out.result(
        call.command,
        common_tokens=difference.common_tokens,
        parted_at=difference.parted_at,
        shared_blocks=difference.shared_blocks,
        shared_bytes=difference.shared_bytes,
        model_parts={part: list(pair) for part, pair in difference.model_parts.items()},
        same_codec=difference.a.codec == difference.b.codec,
        a=_fields(difference.a, texts[0]),
        b=_fields(difference.b, texts[1]),
    )


def _texts(call: Call, store: "Store", difference: "Difference") -> tuple[str, str]:
    from amem_cli.views.decoded_text import TextDecoder
    from kvstore.history.diff import tokens_from

    decoder = TextDecoder(call)
    manifests = difference.a.state.manifest, difference.b.state.manifest
    first, second = (decoder.text(m.model, tokens_from(store, m, difference.common_tokens)) for m in manifests)
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


def _print(call: Call, difference: "Difference") -> None:
    out = call.out
    if difference.parted_at is None:
        out.print(f"tokens     identical, {difference.common_tokens} in all")
    else:
        out.print(f"tokens     {difference.common_tokens} in common; they diverge at token {difference.parted_at}")
    out.print(f"shared     {counted(difference.shared_blocks, BLOCK.name)}, {human_size(difference.shared_bytes)}")
    for side in (difference.a, difference.b):
        tokens = counted(side.state.manifest.tokens, "token")
        own = f"{counted(side.blocks, BLOCK.name)} not shared, {human_size(side.bytes)}"
        out.print(f"{side.state.ref!s:<10} {tokens}, {own}{_turn(side)}")
    for part, pair in difference.model_parts.items():
        a, b = (value[:_DIGITS] if value else "none" for value in pair)
        out.print(f"model      {part} differs: {a}, {b}")
    if difference.a.codec != difference.b.codec:
        out.print(f"codec      {difference.a.codec.name}, {difference.b.codec.name}")


def _turn(side: "Side") -> str:
    if side.turn is None:
        return ""
    label = f" ({side.turn.label})" if side.turn.label else ""
    return f"; diverges in turn {side.turn.index}, {side.turn.role}{label}"
