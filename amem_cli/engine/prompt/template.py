"""A model's chat template, cut into the pieces before, between and after turns.

The template is rendered around sentinel texts that no template contains, and cut at them. The pieces, joined again,
must equal the template's own rendering of whole conversations, or the template is refused. So no table of model names
is needed, and a template that cannot be continued by appending (one that moves the system text into the last turn) is
refused before any token is computed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from kvstore.errors import ModelMismatchError

Message = tuple[str, str]  # role, text
Render = Callable[..., str]  # of (messages, answer)

_SYSTEM = "qxSystemTextxq"
_USER = ("qxUserOnexq", "qxUserTwoxq", "qxUserThreexq")
_ANSWER = ("qxAnswerOnexq", "qxAnswerTwoxq")


class _UncuttableError(Exception):
    """The template's conversations cannot be made by appending turns."""


_FAILURES = (TemplateError, _UncuttableError, TypeError, ValueError, LookupError)  # what a template's code may raise


@dataclass(frozen=True)
class Pieces:
    """The template's text around turns. Joined with the turns' texts they equal the template's rendering."""

    opening: str  # before the first turn when no system text is given: BOS, a default system turn
    start: dict[str, str]  # by role: user, assistant
    end: dict[str, str]
    answer: str  # the generation prompt
    system: tuple[str, str] | None  # before and after a given system text; None: the template refuses one
    folded: bool = False  # True: the system text is a part of the first user turn, which is open after it


def cut(template: str, special: dict[str, str]) -> Pieces:
    """Cut a Jinja chat template into its pieces. `special`: bos_token and other variables of the template.

    Raises ModelMismatchError if its conversations cannot be made by appending turns.
    """

    render_jinja_template = _transformers_renderer()

    def render(messages: Sequence[Message], answer: bool = False) -> str:
        chat = [{"role": role, "content": text} for role, text in messages]
        rendered, _ = render_jinja_template([chat], chat_template=template, add_generation_prompt=answer, **special)
        return str(rendered[0])

    try:
        pieces = _cut_turns(render)
    except _FAILURES as error:
        raise ModelMismatchError(
            "the model's chat template does not render conversations by appending turns",
            "remove the template to use the model with plain text",
        ) from error
    try:
        return _cut_system(render, pieces)
    except _FAILURES:
        return pieces


def _transformers_renderer() -> Callable[..., Any]:
    """The function of transformers that renders chats; importing it must not warn that PyTorch is missing."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    finally:
        logging.disable(disabled)
    renderer: Callable[..., Any] = render_jinja_template
    return renderer


def _cut_turns(render: Render) -> Pieces:
    """The pieces of conversations without a system text."""
    (u1, u2, u3), (a1, a2) = _USER, _ANSWER
    dialogue = [("user", u1), ("assistant", a1), ("user", u2), ("assistant", a2), ("user", u3)]
    lead, end_user = _split(render(dialogue[:1]), u1)
    _, end_answer = _split(render(dialogue[:2]), a1)
    head, tail = _split(render(dialogue[:3]), a1)
    start_answer = _without_prefix(_split(head, u1)[1], end_user)
    start_user = _without_prefix(_split(tail, u2)[0], end_answer)
    answer = _without_prefix(_split(render(dialogue[:1], answer=True), u1)[1], end_user)
    if not lead.endswith(start_user):
        raise _UncuttableError
    pieces = Pieces(
        opening=lead.removesuffix(start_user),
        start={"user": start_user, "assistant": start_answer},
        end={"user": end_user, "assistant": end_answer},
        answer=answer,
        system=None,
    )
    _check_joined(render, pieces, dialogue)
    return pieces


def _cut_system(render: Render, pieces: Pieces) -> Pieces:
    """`pieces` with those around a system text."""
    (u1, u2, _), (a1, _) = _USER, _ANSWER
    dialogue = [("system", _SYSTEM), ("user", u1), ("assistant", a1), ("user", u2)]
    before, rest = _split(render(dialogue[:2]), _SYSTEM)
    after = _split(rest, u1)[0]
    start_user = pieces.start["user"]
    folded = not after.endswith(start_user)
    after = after if folded else after.removesuffix(start_user)
    pieces = replace(pieces, system=(before, after), folded=folded)
    _check_joined(render, pieces, dialogue)
    return pieces


def _check_joined(render: Render, pieces: Pieces, dialogue: Sequence[Message]) -> None:
    """Raise unless the joined pieces equal the template's own rendering of `dialogue` and a generation prompt."""
    text, turns, open_turn = pieces.opening, dialogue, False
    if dialogue[0][0] == "system" and pieces.system is not None:
        before, after = pieces.system
        text, turns, open_turn = before + dialogue[0][1] + after, dialogue[1:], pieces.folded
    for role, own in turns:
        text += ("" if open_turn else pieces.start[role]) + own + pieces.end[role]
        open_turn = False
    if text + pieces.answer != render(dialogue, answer=True):
        raise _UncuttableError


def _split(text: str, at: str) -> tuple[str, str]:
    parts = text.split(at)
    if len(parts) != 2:
        raise _UncuttableError
    return parts[0], parts[1]


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise _UncuttableError
    return text.removeprefix(prefix)
