"""In which order requests are prefilled, so that a prefix that several share is computed once.

After a recovery the whole group of a prompt is prefilled anew, all at once. An engine whose cache knows a block only
when the step that computed it is over would compute the same prefix once for every member of the group. Here a request
waits while another one is computing more of its prefix than the cache holds already.

Pure bookkeeping. (vLLM needs none of it: it enters a block into its cache when it schedules the block, and requests of
the same step read it behind the write.)
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefillOrder:
    """Says which queued requests may be prefilled now. `page` is the number of tokens that the cache shares at once."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._queued: dict[str, list[int]] = {}  # hashes of the whole prefix up to each page's end
        self._computing: dict[str, list[int]] = {}
        self._computed: dict[str, list[int]] = {}

    def add(self, key: str, tokens: Sequence[int]) -> None:
        """Queue a request that has `tokens` to prefill."""
        chain, last = [], 0
        # the last token is never taken from a cache: something must be computed to get the next one
        for end in range(self._page, len(tokens), self._page):
            last = hash((last, *tokens[end - self._page : end]))
            chain.append(last)
        self._queued[key] = chain

    def ready(self) -> list[str]:
        """The requests to prefill now, in the order in which they came. They are computing from here on."""
        ready = []
        for key, chain in list(self._queued.items()):
            coming = _most_shared(chain, self._computing)
            if coming and coming > _most_shared(chain, self._computed):
                continue
            del self._queued[key]
            self._computing[key] = chain
            ready.append(key)
        return ready

    def computed(self, key: str) -> None:
        """The request's whole prefix is in the cache. Saying it again changes nothing."""
        if (chain := self._computing.pop(key, None)) is not None:
            self._computed[key] = chain

    def end(self, key: str) -> None:
        """The request is over, or nobody wants it any more."""
        for table in (self._queued, self._computing, self._computed):
            table.pop(key, None)


def _most_shared(chain: list[int], others: dict[str, list[int]]) -> int:
    return max((_shared(chain, other) for other in others.values()), default=0)


def _shared(one: list[int], other: list[int]) -> int:
    """Pages at the beginning that both have; a hash covers all before it, so halving finds the first difference."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
