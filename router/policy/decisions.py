"""The last decisions about requests, with all that was known of every candidate: for people who ask why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from router.policy.request_view import RequestView
from router.policy.scoring import Choice

if TYPE_CHECKING:
    from router.policy.admission import Outlay

_REQUEST_ID_CHARACTERS = 64


class Decisions:
    """A ring of `size`; with 0 nothing is kept and nothing costs anything. No text of a prompt ever gets here."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._number = 0
        self._entries: OrderedDict[int, dict[str, object]] = OrderedDict()
        self._of_batch: dict[int, int] = {}

    def admitted(self, batch_id: int, request_id: str, view: RequestView, choice: Choice, outlays: Sequence[Outlay], now: float) -> None:
        if self._size:
            self._of_batch[batch_id] = self._add(request_id, view, "admitted", choice.reason, choice, outlays, now)

    def refused(self, request_id: str, view: RequestView, reason: str, outlays: Sequence[Outlay], now: float) -> None:
        if self._size:
            self._add(request_id, view, "refused", reason, None, outlays, now)

    def outcome(self, batch_id: int, queue_time_s: float | None, ttft_s: float, cached_tokens: int | None) -> None:
        """Of the batch's first choice to have a token."""
        number = self._of_batch.pop(batch_id, None)
        entry = None if number is None else self._entries.get(number)
        if entry is not None:
            entry["actual"] = {"queue_time_s": queue_time_s, "ttft_s": ttft_s, "hit_tokens": cached_tokens}

    def forget(self, batch_id: int) -> None:
        self._of_batch.pop(batch_id, None)

    def last(self) -> Sequence[Mapping[str, object]]:
        """Oldest first."""
        return tuple(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def open(self) -> int:
        """Batches whose outcome is awaited."""
        return len(self._of_batch)

    def _add(
        self,
        request_id: str,
        view: RequestView,
        verdict: str,
        reason: str,
        choice: Choice | None,
        outlays: Sequence[Outlay],
        now: float,
    ) -> int:
        self._number += 1
        self._entries[self._number] = {
            "number": self._number,
            "at_s": now,
            "request_id": request_id[:_REQUEST_ID_CHARACTERS],
            "class": view.request_class,
            "tenant": view.tenant,
            "prompt_tokens": view.prompt_tokens,
            "choices": view.choices,
            "verdict": verdict,
            "reason": reason,
            "replica": None if choice is None else choice.incarnation.replica_id,
            "candidates": [_candidate(one, now) for one in outlays],
            "actual": None,
        }
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return self._number


def _candidate(one: Outlay, now: float) -> dict[str, object]:
    forecast = one.candidate.forecast
    return {
        "replica": one.candidate.incarnation.replica_id,
        "epoch": one.candidate.incarnation.epoch,
        "hit_tokens": forecast.cached_tokens,
        "new_tokens": forecast.new_tokens,
        "requests": forecast.batch,
        "queue_s": one.wait_s(0.5, now),
        "ttft_s": one.ttft_s(0.5, now),
        "ttft_p90_s": one.ttft_s(0.9, now),
        "ttft_p98_s": one.ttft_s(0.98, now),
        "ttft_uncalibrated_s": forecast.ttft_s,
        "tpot_s": forecast.tpot_s,
        "scale": one.candidate.scale,
        "keeps_tpot": one.candidate.keeps_tpot,
        "is_stale": one.candidate.is_stale,
    }
