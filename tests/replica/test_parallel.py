"""Ranks of a replica: collectives, the broadcast of Steps, and what happens when one of them is lost."""

from __future__ import annotations

import pytest
import torch

from replica.parallel.group import SingleRank
from tests.replica import parallel_ranks as ranks


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_one_rank_is_the_identity() -> None:
    tensor = torch.tensor([1.0, 2.0])
    tp = SingleRank()
    assert tp.all_reduce(tensor) is tensor
    assert tp.all_gather_last_dim(tensor) is tensor


def test_three_ranks_reduce_and_gather() -> None:
    results = ranks.run(ranks.collectives, 3, 3)
    for rank, (number, reduced, gathered, contiguous) in enumerate(results):
        assert number == rank
        assert reduced == [6.0, 30.0]
        assert gathered == [[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 2
        assert contiguous


def test_every_rank_sees_the_same_steps_and_idling_is_no_fault() -> None:
    (_, tokens, seen, copies), (_, count, other_seen, other_copies) = ranks.run(ranks.steps, 2, 2)
    assert tokens == [[45, None], [50, None], [45]]  # 15 × (1 + 2), 50 × 3 mod 100
    assert count == 3
    assert other_seen == seen
    assert other_copies == copies == [(2, 3)]


@pytest.mark.parametrize(
    ("target", "errors", "within_s"),
    [
        ("vanishing", {(0, "GroupBroken"), (0, "still lost"), (2, "GroupBroken")}, 4.0),
        ("failing", {(0, "GroupBroken"), (0, "still lost"), (1, "MemoryError")}, 4.0),
        ("hanging", {(0, "GroupBroken"), (0, "still lost")}, 8.0),
        ("failing_at_home", {(0, "RunnerLost"), (0, "still lost"), (1, "GroupBroken")}, 4.0),
    ],
)
def test_a_lost_rank_brings_the_others_down(target: str, errors: set[tuple[int, str]], within_s: float) -> None:
    results = ranks.run(getattr(ranks, target), max(rank for rank, _ in errors | {(1, "")}) + 1, len(errors))
    assert {(rank, name) for rank, name, _ in results} == errors
    assert all(after_s < within_s for _, _, after_s in results), results


def test_a_rank_that_cannot_load_is_heard_of() -> None:
    results = ranks.run(ranks.failing_to_load, 2, 2)
    assert results == [(0, "GroupBroken", "rank 1: no shard"), (1, "FileNotFoundError", "no shard")]


def test_other_weights_on_one_rank_are_refused_by_all() -> None:
    said = "rank 2 differs from rank 0: weights 'other' (rank 0: 'same')"
    assert ranks.run(ranks.disagreeing, 3, 3) == [(0, said), (1, said), (2, said)]


def test_joining_has_a_deadline() -> None:
    results = ranks.run(ranks.incomplete, 2, 1)
    assert results == [(0, "rank 0 of 2 could not join: rank(s) 1 have not come to 127.0.0.1 within 2 s")]
