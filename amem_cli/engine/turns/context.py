"""The model's context: texts are added to transcripts, and refused where the context ends before they do."""

from collections.abc import Sequence

from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.prompt.transcript import Text, Transcript
from kvstore.errors import UsageError

TEMPLATE_TOKENS = 64  # more than any template puts around a turn


class Context:
    """Adds texts to transcripts of one model. `limit`: the tokens that the model's context holds; None if unknown."""

    def __init__(self, model: LoadedModel) -> None:
        self.limit = model.context_length
        self._prompt = model.prompt

    def add(self, transcript: Transcript, texts: Sequence[Text], *, answered: bool = False) -> None:
        """Add texts, and open an answer if `answered`. Raises UsageError where the context ends before they do."""
        for text in texts:
            transcript.add(self._prompt, text)
        if answered:
            transcript.begin_answer(self._prompt)
        self.check(len(transcript.tokens) + answered)

    def longest(self, texts: Sequence[Text]) -> int:
        """An upper bound on the tokens that texts become, with what a template puts around them."""
        return sum(len(self._prompt.encode(text.text)) + TEMPLATE_TOKENS for text in texts) + TEMPLATE_TOKENS

    def check(self, tokens: int) -> None:
        """Raises UsageError for more tokens than the context holds."""
        if self.limit is not None and tokens > self.limit:
            raise UsageError(
                f"the conversation would have {tokens} tokens, and the model's context ends at {self.limit}",
                "give less text, or use a model with a longer context",
            )
