"""Feeds: the lengths of the passes that computed a cache, as runs of (tokens in one pass, number of passes)."""


def add_feed(feeds: tuple[tuple[int, int], ...], length: int) -> tuple[tuple[int, int], ...]:
    """`feeds` with one more pass of `length` tokens."""
    if feeds and feeds[-1][0] == length:
        return (*feeds[:-1], (length, feeds[-1][1] + 1))
    return (*feeds, (length, 1))


def cut_feeds(feeds: tuple[tuple[int, int], ...], position: int) -> tuple[tuple[int, int], ...]:
    """The passes that reach `position`; the last one is shortened where it goes beyond."""
    kept: tuple[tuple[int, int], ...] = ()
    for length, count in feeds:
        whole = min(count, position // length)
        kept += ((length, whole),) if whole else ()
        position -= length * whole
        if whole < count:
            return add_feed(kept, position) if position else kept
    return kept
