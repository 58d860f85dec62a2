"""Tokens through the model, pass by pass.

The boundaries of passes follow from the position and the number of tokens alone, never from time or memory, so that
the same text fed in the same steps gives the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from amem_cli.engine.cache.agent_cache import AgentCache
from kvstore.format.feeds import add_feed
from kvstore.format.parts import BLOCK_TOKENS

# A pass computes logits for each of its tokens, and only the last one's are wanted. Up to this many tokens that costs
# less than a second pass over the weights for the last token alone.
LAST_ALONE = 16


def passes(start: int, tokens: int, logits: bool) -> Iterator[int]:
    """Lengths of the passes that take `tokens` tokens from position `start`: none crosses a block's end.

    With `logits` the last token of a long last pass is a pass of its own.
    """
    while tokens:
        length = min(tokens, BLOCK_TOKENS - start % BLOCK_TOKENS)
        if logits and length == tokens and length > LAST_ALONE:
            length -= 1
        yield length
        start, tokens = start + length, tokens - length


@dataclass
class Feeder:
    """Feeds one agent's tokens. `feeds` records the lengths of its passes, so that they can be replayed."""

    model: Module
    cache: AgentCache
    feeds: tuple[tuple[int, int], ...] = ()

    def feed(self, tokens: Sequence[int], logits: bool = False) -> mx.array | None:
        """One pass. Returns the last token's logits [vocabulary] in float32 if `logits`."""
        out = self.model(mx.array([list(tokens)]), cache=self.cache.layers)
        last = out[0, -1].astype(mx.float32) if logits else None
        del out
        self.cache.settle(len(tokens), *([] if last is None else [last]))
        self.feeds = add_feed(self.feeds, len(tokens))
        return last
