"""Baselines that go where the prefix is: longest match, and the public rules of SGLang's and Ray Serve LLM's routers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from router.policy.incarnation import Incarnation
from router.policy.request_view import RequestView
from router.policy.scoring import Candidate, Choice, least_of

_REMEMBERED = 4096  # incarnations


class LongestPrefix:
    """The longest match, blind for load; of equals the one with the fewest requests."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        longest = max(one.forecast.cached_tokens for one in candidates)
        equal = [one for one in candidates if one.forecast.cached_tokens == longest]
        return least_of(equal, [one.forecast.batch for one in equal], self._random, "longest_prefix")


class SglangCacheAware:
    """Where the loads are out of balance (difference above 64 and ratio above 1.5) the fewest requests; else the longest match if it
    is above 0.3 of the prompt, else the fewest requests again."""

    MATCH_MIN = 0.3
    DIFFERENCE_MAX = 64
    RATIO_MAX = 1.5

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        loads = [one.forecast.batch - request.choices for one in candidates]
        least, most = min(loads), max(loads)
        if most - least > self.DIFFERENCE_MAX and most > self.RATIO_MAX * least:
            return least_of(candidates, loads, self._random, "imbalance")
        longest = max(one.forecast.cached_tokens for one in candidates)
        if longest > self.MATCH_MIN * request.prompt_tokens:
            return least_of(candidates, [-one.forecast.cached_tokens for one in candidates], self._random, "match")
        return least_of(candidates, loads, self._random, "least_requests")


class Inserted:
    """Tokens that this router has added to each replica's tree of prefixes: every dispatch adds what it did not find."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[Incarnation, int] = OrderedDict()

    def __getitem__(self, one: Candidate) -> int:
        return self._tokens.get(one.incarnation, 0)

    def add(self, choice: Choice) -> Choice:
        self._tokens[choice.incarnation] = self._tokens.pop(choice.incarnation, 0) + choice.forecast.new_tokens
        if len(self._tokens) > _REMEMBERED:
            self._tokens.popitem(last=False)
        return choice


class RayPrefix:
    """The longest match if it is at least 0.1 of the prompt, of equals the better of two by chance; else the smallest tree."""

    MATCH_MIN = 0.1

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._inserted = Inserted()

    def choose(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Choice:
        longest = max(one.forecast.cached_tokens for one in candidates)
        if longest >= self.MATCH_MIN * request.prompt_tokens:
            equal = [one for one in candidates if one.forecast.cached_tokens == longest]
            two = self._random.sample(equal, min(2, len(equal)))
            return self._inserted.add(least_of(two, [one.forecast.batch for one in two], self._random, "match"))
        return self._inserted.add(least_of(candidates, [self._inserted[one] for one in candidates], self._random, "smallest_tree"))
