"""Decodes the tokens of agents, on request only, with the model's tokenizer and without loading the model or MLX."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from amem_cli.shell.options import Call
from kvstore.errors import ModelMismatchError
from kvstore.format.manifest import ModelIdentity, Role

if TYPE_CHECKING:
    from amem_cli.engine.prompt.tokens import PromptFormat


class TextDecoder:
    """Decodes for one command, and loads the tokenizer of each model once."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._prompts: dict[str, PromptFormat] = {}

    def text(self, model: ModelIdentity, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included. Raises NotFoundError, and ModelMismatchError.

        The tokenizer must be the one that made the agent.
        """
        return self._prompt(model).decode(ids)

    def answer(self, model: ModelIdentity, ids: Sequence[int]) -> str:
        """The text of an answer, without the template's tokens around it. Raises as `text`."""
        return self.turn_text(model, "assistant", ids)

    def turn_text(self, model: ModelIdentity, role: Role, ids: Sequence[int]) -> str:
        """The text of a turn of that role, without the template's tokens around it. Raises as `text`."""
        prompt, inner = self._prompt(model), list(ids)
        if role == "raw":
            return prompt.decode(inner)
        if role == "system":
            return prompt.decode(_inside(inner, prompt.opening("")))
        opening = prompt.answer_start() if role == "assistant" else prompt.turn_start(role)
        for place in range(len(inner) - len(opening) + 1 if opening else 0):
            if inner[place : place + len(opening)] == opening:
                inner = inner[place + len(opening) :]
                break
        while inner and inner[-1] in prompt.stop_ids:
            inner.pop()
        return prompt.decode(inner)

    def _prompt(self, model: ModelIdentity) -> "PromptFormat":
        if model.fingerprint not in self._prompts:
            from amem_cli.engine.models import fingerprint, registry, sources, tokenizer

            cache = self._call.cache_dir
            entry = registry.find(self._call.layout, model.name)
            folder = sources.materialize(entry, cache)
            present = fingerprint.identify(folder, entry.adapter, entry.name, sources.memory(cache))
            if "tokenizer" in fingerprint.compare(model, present):
                raise ModelMismatchError(
                    f"the tokenizer of {model.name} is not the one that made the agent",
                    "register the model that made it",
                )
            self._prompts[model.fingerprint] = tokenizer.load_prompt(folder)
        return self._prompts[model.fingerprint]


def _inside(ids: Sequence[int], around: Sequence[int]) -> Sequence[int]:
    """`ids` without their common prefix with `around`, and without the rest of `around` at their end."""
    from amem_cli.engine.prompt.transcript import common_prefix

    before = common_prefix(ids, around)
    after = common_prefix(ids[::-1], around[before:][::-1])
    return ids[before : len(ids) - after]
