"""What rows ask, told to the fused sampler, against the host's own draws: the same tokens, scores and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.ops import REFERENCE
from kernels.reference.sampling import SamplingRows
from replica.contract.messages import SamplingParams
from replica.device_sampler import pack_rows, sample_on_device
from replica.sampler import NOT_FINITE, sample
from replica.step import Draw, Outcome

VOCAB = 77  # no multiple of a mask's words
EOS = frozenset({2, 500})


class Mask:
    def __init__(self, passing: Sequence[int], size: int = VOCAB) -> None:
        self.bits = np.zeros(size, np.bool_)
        self.bits[list(passing)] = True

    def allowed(self, output_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        return self.bits


class Broken(Mask):
    def allowed(self, output_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        raise RuntimeError("no such rule")


def draw(
    mask: Any = None, choice: int = 0, prompt: Sequence[int] = (3, 4, 5, 3, 900), output: Sequence[int] = (7, 7, 9), **asks: Any
) -> Draw:
    params = {"seed": 5, "max_tokens": 9, "temperature": 0.8, **asks}
    return Draw(SamplingParams(**params), choice, list(prompt), list(output), mask)


TABLE = (
    draw(temperature=0.0),
    draw(),
    draw(choice=1),
    draw(seed=-(1 << 63)),
    draw(seed=(1 << 64) - 3),
    draw(top_k=5),
    draw(top_p=0.6, logprobs=3),
    draw(min_p=0.2, logprobs=0),
    draw(top_k=9, top_p=0.7, min_p=0.05),
    draw(repetition_penalty=1.4),
    draw(presence_penalty=1.5, frequency_penalty=-0.7),
    draw(logit_bias=((7, 2.5), (11, -3.0), (7, 1.0), (400, 9.0), (-1, 9.0))),
    draw(bad_words=((8,), (9, 12), (7, 9, 13), (4, 4, 14)), temperature=0.0),
    draw(min_tokens=6, stop_token_ids=(20, 21)),
    draw(min_tokens=6, ignore_eos=True),
    draw(allowed_token_ids=(10, 11, 12, 600, -4), logprobs=5),
    draw(Mask(range(40, 60))),
    draw(Mask(range(40, 60)), allowed_token_ids=(41, 42, 70), repetition_penalty=1.1, prompt=(41,)),
    draw(Mask(range(40, 41)), bad_words=((40,),)),  # the ban is lifted: nothing else is left
)
FAILING = (
    (draw(Broken(())), "sampling parameters could not be applied: no such rule"),
    (draw(Mask((1,), 5)), "sampling parameters could not be applied: the mask has (5,) entries"),
    (draw(Mask(())), "allowed_token_ids and the mask leave no token"),
    (draw(Mask((5,)), allowed_token_ids=(6,)), "allowed_token_ids and the mask leave no token"),
)


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def assert_alike(ours: Sequence[Outcome], right: Sequence[Outcome]) -> None:
    for mine, theirs in zip(ours, right, strict=True):
        assert (mine.token, mine.error) == (theirs.token, theirs.error)
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        if mine.logprobs is not None and theirs.logprobs is not None:
            assert mine.logprobs.token_id == theirs.logprobs.token_id
            assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-5)
            assert [token for token, _ in mine.logprobs.top] == [token for token, _ in theirs.logprobs.top]
            assert [value for _, value in mine.logprobs.top] == pytest.approx([value for _, value in theirs.logprobs.top], abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_row_in_one_batch(seed: int) -> None:
    values = logits(len(TABLE)) + torch.randn(len(TABLE), VOCAB, generator=torch.Generator().manual_seed(seed))
    assert_alike(sample_on_device(REFERENCE.sampling, values, TABLE, EOS), sample(values, TABLE, EOS))


def test_a_row_is_drawn_alone_as_in_the_batch() -> None:
    values = logits(len(TABLE))
    together = sample_on_device(REFERENCE.sampling, values, TABLE, EOS)
    alone = [sample_on_device(REFERENCE.sampling, values[row : row + 1], TABLE[row : row + 1], EOS)[0] for row in range(len(TABLE))]
    assert_alike(alone, together)


def test_an_error_ends_its_own_row_alone() -> None:
    draws = [TABLE[1], *(one for one, _ in FAILING), TABLE[2]]
    outcomes = sample_on_device(REFERENCE.sampling, logits(len(draws)), draws, EOS)
    assert all(message in outcome.error for outcome, (_, message) in zip(outcomes[1:-1], FAILING, strict=True))
    assert_alike([outcomes[0], outcomes[-1]], [sample(logits(len(draws)), draws, EOS)[row] for row in (0, -1)])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(poison: float) -> None:
    values = logits(3)
    values[1, 30] = poison
    outcomes = sample_on_device(REFERENCE.sampling, values, TABLE[:3], EOS)
    assert [outcome.error for outcome in outcomes] == ["", NOT_FINITE, ""]


def test_what_nobody_asks_is_not_sent() -> None:
    rows: SamplingRows = pack_rows([draw(), draw(temperature=0.0)], VOCAB, EOS, {})
    assert rows.allowed is rows.prompt_seen is rows.output_counts is rows.bias is rows.banned is None


def test_the_comparison_sees_a_wrong_column() -> None:
    """The control: counts and numbers as they come, one column shifted."""

    def shifted(values: torch.Tensor, rows: SamplingRows, top: int) -> Any:
        rows.counts[:, 2] += 1
        return REFERENCE.sampling(values, rows, top)

    values = logits(len(TABLE))
    with pytest.raises(AssertionError):
        assert_alike(sample_on_device(shifted, values, TABLE, EOS), sample(values, TABLE, EOS))
