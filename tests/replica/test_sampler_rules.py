"""Penalties, biases and bans on one row of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.contract.messages import SamplingParams
from replica.logit_rules import apply_rules, has_rules
from replica.step import Draw

EOS = frozenset({2, 6})
START = np.array([1.0, -1.0, 2.0, 0.5, 0.0, -2.0, 3.0, 4.0], np.float32)
INF = float("inf")


def ruled(prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **changes: Any) -> npt.NDArray[np.float32]:
    logits = START.copy()
    one = Draw(SamplingParams(**{"seed": 0, "max_tokens": 9, **changes}), 0, prompt, output)
    apply_rules(logits, one, EOS)
    assert has_rules(one) or np.array_equal(logits, START)
    return logits


def test_repetition_counts_prompt_and_output_from_the_first_step() -> None:
    assert ruled((0, 0, 1), (), repetition_penalty=2.0)[:3].tolist() == [0.5, -2.0, 2.0]
    assert ruled((0, 0, 1), (2, 2), repetition_penalty=2.0)[:3].tolist() == [0.5, -2.0, 1.0]


def test_the_smallest_repetition_penalty_leaves_finite_logits_in_their_order() -> None:
    """Divided by 1e-300 itself, a logit would be infinite, and the request would fail as if the model had."""
    logits = ruled((0, 2, 6, 5, 4), (), repetition_penalty=1e-300)
    assert np.isfinite(logits).all()
    assert logits[[5, 4, 7, 0, 2, 6]].tolist() == sorted(logits[[5, 4, 7, 0, 2, 6]].tolist())
    assert START[7] < logits[0] < logits[2] < logits[6]


def test_presence_and_frequency_count_the_output_alone() -> None:
    assert np.array_equal(ruled((0, 0, 0), (), presence_penalty=2.0, frequency_penalty=2.0), START)
    assert ruled((0,), (1, 3, 1), presence_penalty=2.0)[:4].tolist() == [1.0, -3.0, 2.0, -1.5]
    assert ruled((0,), (1, 3, 1), frequency_penalty=2.0)[:4].tolist() == [1.0, -5.0, 2.0, -1.5]
    assert ruled((), (1,), presence_penalty=-2.0)[1] == 1.0


def test_moved_requests_are_penalized_alike() -> None:
    """What an earlier attempt emitted counts as output, not as prompt."""
    changes: dict[str, Any] = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    assert np.array_equal(ruled((1, 2), (3, 3), **changes), ruled((2, 1), (3, 3), **changes))
    assert not np.array_equal(ruled((1, 2), (3, 3), **changes), ruled((1, 2, 3, 3), (), **changes))


def test_bias_adds_up_and_ignores_what_is_no_token() -> None:
    assert ruled(logit_bias=((1, 5.0), (1, 1.0), (99, 5.0), (-1, 5.0)))[:2].tolist() == [1.0, 5.0]


def test_penalties_come_after_biases_as_vllms_do() -> None:
    """2 + 4 is halved; the other order would give 1 + 4."""
    assert ruled((2,), logit_bias=((2, 4.0), (1, 3.0)), repetition_penalty=2.0)[:3].tolist() == [1.0, 2.0, 3.0]
    assert ruled((), (2,), logit_bias=((2, 4.0),), presence_penalty=2.0)[2] == 4.0


class Even:
    """A rule of its own: even tokens, and nothing after three of them."""

    def allowed(self, output_ids: Any) -> npt.NDArray[np.bool_]:
        return (np.arange(8) % 2 == 0) & (len(output_ids) < 3)


def masked(mask: Any, output: tuple[int, ...] = (), **changes: Any) -> npt.NDArray[np.float32]:
    logits = START.copy()
    one = Draw(SamplingParams(**{"seed": 0, "max_tokens": 9, **changes}), 0, (), output, mask)
    assert has_rules(one)
    apply_rules(logits, one, EOS)
    return logits


def test_a_mask_lets_pass_what_allowed_ids_do_too() -> None:
    assert np.flatnonzero(np.isfinite(masked(Even()))).tolist() == [0, 2, 4, 6]
    assert np.flatnonzero(np.isfinite(masked(Even(), allowed_token_ids=(1, 2, 4)))).tolist() == [2, 4]
    assert np.flatnonzero(np.isfinite(masked(Even(), logit_bias=((1, 50.0),), bad_words=((0,),)))).tolist() == [2, 4, 6]


def test_a_mask_is_never_lifted_and_must_fit() -> None:
    with pytest.raises(ValueError, match="leave no token"):
        masked(Even(), (2, 2, 2))
    with pytest.raises(ValueError, match="leave no token"):
        masked(Even(), allowed_token_ids=(1, 3))

    class Short:
        def allowed(self, output_ids: Any) -> npt.NDArray[np.bool_]:
            return np.ones(7, np.bool_)

    with pytest.raises(ValueError, match=r"\(7,\) entries of bool"):
        masked(Short())


def test_allowed_ids() -> None:
    logits = ruled(allowed_token_ids=(3, 5, 99))
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [3, 5] and logits[3] == 0.5


def test_bad_words_are_stopped_at_their_last_token() -> None:
    words = ((3,), (4, 5), (0, 1, 7))
    assert np.flatnonzero(np.isneginf(ruled((4,), (), bad_words=words))).tolist() == [3]
    assert np.flatnonzero(np.isneginf(ruled((), (4,), bad_words=words))).tolist() == [3, 5]
    assert np.flatnonzero(np.isneginf(ruled((), (0, 1), bad_words=words))).tolist() == [3, 7]


def test_nothing_ends_before_min_tokens() -> None:
    changes: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (4,)}
    assert np.flatnonzero(np.isneginf(ruled((), (0,), **changes))).tolist() == [2, 4, 6]
    assert np.array_equal(ruled((), (0, 0), **changes), START)
    assert np.flatnonzero(np.isneginf(ruled((), (0,), ignore_eos=True, **changes))).tolist() == [4]


def test_bans_that_leave_nothing_are_lifted() -> None:
    assert np.flatnonzero(np.isfinite(ruled(allowed_token_ids=(2, 6), min_tokens=3))).tolist() == [2, 6]
    assert np.array_equal(ruled(bad_words=tuple((i,) for i in range(8))), START)


@given(
    st.lists(st.integers(0, 9), max_size=8),
    st.lists(st.integers(0, 9), max_size=8),
    st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.floats(0.01, 2.0),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "min_tokens": st.integers(0, 9),
            "stop_token_ids": st.lists(st.integers(0, 12), max_size=3).map(tuple),
            "ignore_eos": st.booleans(),
            "allowed_token_ids": st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple),
            "bad_words": st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=9).map(tuple),
            "logit_bias": st.lists(st.tuples(st.integers(-2, 12), st.floats(-100, 100, width=32)), max_size=4).map(tuple),
        },
    ),
)
def test_a_best_token_always_remains_and_only_allowed_ones(prompt: list[int], output: list[int], changes: dict[str, Any]) -> None:
    logits = ruled(tuple(prompt), tuple(output), **changes)
    assert np.isfinite(logits.max()) and not np.isnan(logits).any()
    allowed = changes.get("allowed_token_ids")
    if allowed is not None:
        assert set(np.flatnonzero(np.isfinite(logits)).tolist()) <= set(allowed)
