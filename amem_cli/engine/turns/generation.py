"""Sampling a token from logits, and stop strings in the text that the tokens become."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import xxhash
from mlx_lm.sample_utils import apply_top_p

from kvstore.format.manifest import Sampling


def sample(logits: mx.array, sampling: Sampling, position: int) -> int:
    """The token at `position`, from logits [vocabulary] in float32.

    A function of logits, seed and position alone, so that a resumed conversation samples the same tokens.
    """
    if sampling.temp == 0:
        return _int(mx.argmax(logits))
    log_probabilities = (logits - mx.logsumexp(logits))[None]
    if 0 < sampling.top_p < 1:
        log_probabilities = apply_top_p(log_probabilities, sampling.top_p)
    key = mx.random.key(xxhash.xxh3_64_intdigest(f"{sampling.seed}/{position}".encode()))
    return _int(mx.random.categorical(log_probabilities / sampling.temp, key=key))


def _int(array: mx.array) -> int:
    value = array.item()
    assert isinstance(value, int)
    return value


class StopStrings:
    """Streams text up to the first stop string. The possible beginning of a stop string is held back."""

    def __init__(self, strings: Sequence[str], emit: Callable[[str], None]) -> None:
        self._strings = [s for s in strings if s]
        self._emit = emit
        self._held = ""
        self.emitted = ""
        self.found = False

    def add(self, piece: str) -> None:
        """Take the next piece of text. After `found` nothing more is emitted."""
        if self.found:
            return
        self._held += piece
        places = [at for s in self._strings if (at := self._held.find(s)) >= 0]
        if places:
            self.found = True
            self._pass(min(places))
        else:
            self._pass(len(self._held) - max(map(self._overhang, self._strings), default=0))

    def finish(self) -> None:
        """Emit what was held back, since nothing follows."""
        if not self.found:
            self._pass(len(self._held))

    def _overhang(self, string: str) -> int:
        """The length of the longest end of the held text that is a beginning of `string`."""
        return next((n for n in range(len(string) - 1, 0, -1) if self._held.endswith(string[:n])), 0)

    def _pass(self, length: int) -> None:
        out, self._held = self._held[:length], self._held[length:]
        if out:
            self.emitted += out
            self._emit(out)
