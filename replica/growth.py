"""How much KV the running requests will still want: what bounds over-commit, learned from what finished before."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from itertools import accumulate

from replica.request import Request

_FIRST_MEAN_TOKENS = 256.0
_SLOWEST_RATE = 0.05
_OUTLIVED_DIVISOR = 4  # whoever has outlived the estimate is expected to go on for a quarter of what it has


class GrowthEstimate:
    """Running mean of the outputs' lengths; a request that cannot stop early is known exactly."""

    def __init__(self) -> None:
        self._mean_tokens = _FIRST_MEAN_TOKENS
        self._seen = 0

    def learn(self, output_tokens: int) -> None:
        """A request has ended by itself after `output_tokens`."""
        self._seen += 1
        rate = max(1.0 / self._seen, _SLOWEST_RATE)
        self._mean_tokens += rate * (output_tokens - self._mean_tokens)

    def tokens_to_come(self, request: Request) -> int:
        at_most = request.tokens_max - len(request.tokens)
        sampling = request.draw.sampling
        if sampling.ignore_eos and not sampling.stop_token_ids:
            return at_most
        generated = len(request.output_ids)
        expected = max(int(self._mean_tokens) - generated, generated // _OUTLIVED_DIVISOR, 1)
        return min(expected, at_most)


def lacks_page(request: Request, block_size: int) -> bool:
    """Its next token needs a page that it has not got yet."""
    return request.remaining == 1 and request.computed == len(request.blocks) * block_size


class Forecast:
    """Blocks in use from now on if nothing else starts, and whether one more request would fit on top.

    Requests are laid out by the tokens they still have to come. Just before one of them ends, all that end later have
    grown as much as it has, and all that ended before have given back what they held: the peaks are at the ends. One more
    request raises the peaks up to its own end, and no later one; so the highest of both kinds are kept for each place. Pages that
    the step being planned is going to give to those who run count as given, so it says the same before and after that.
    """

    def __init__(self, *, capacity: int, in_use: int, block_size: int, running: Iterable[Request], growth: GrowthEstimate) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._growth = growth
        self._ends: list[tuple[int, int]] = []
        for request in running:
            lacking = lacks_page(request, block_size)
            in_use += lacking
            self._ends.append((growth.tokens_to_come(request), request.history.own_blocks + lacking))
        self._ends.sort()
        self._in_use = in_use
        self._lay_out()

    def fits(self, request: Request, needed: int) -> bool:
        """Would `request`, that takes `needed` blocks now, still leave room for everybody's growth?"""
        to_come = self._growth.tokens_to_come(request)
        place = bisect_right(self._ends, to_come, key=_first)
        own = self._held[place] + (len(self._ends) - place + 1) * -(-to_come // self._block_size)
        return needed + max(own, self._before[place]) <= self._capacity and self._after[place] <= self._capacity

    def add(self, request: Request, needed: int) -> None:
        """`request` has been started."""
        insort(self._ends, (self._growth.tokens_to_come(request), needed))
        self._in_use += needed
        self._lay_out()

    def _lay_out(self) -> None:
        """For each place among the ends: blocks held once those before have ended, their highest peak with one more that
        grows along, and the highest peak from there on."""
        held, alive = self._in_use, len(self._ends)
        self._held = [held]
        self._before = [0]
        peaks: list[int] = []
        for to_come, own in self._ends:
            growth = -(-to_come // self._block_size)
            peaks.append(held + alive * growth)
            self._before.append(max(self._before[-1], peaks[-1] + growth))
            held -= own
            alive -= 1
            self._held.append(held)
        self._after = [*accumulate(reversed(peaks), max, initial=0)][::-1]


def _first(end: tuple[int, int]) -> int:
    return end[0]
