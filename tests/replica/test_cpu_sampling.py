"""Drawing in C++: the tokens of numpy's path, whatever the logits, the company and the number of threads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.abi import DRAW
from kernels.cpu.decoder import StepFault
from replica.contract.messages import SamplingParams
from replica.forward import CpuForward
from replica.sampler import sample
from replica.step import Draw
from tests.kernels.plain_decoder import Sequences, Sizes, build, library_or_reason

ISA, REASON = library_or_reason()
pytestmark = pytest.mark.skipif(ISA is None, reason=f"no C++ step here: {REASON}")
EOS = frozenset({2})
EDGE = 2e-6  # numpy's masses are rounded: where top-p ends within that of a token's mass it may end beside it
VOCABULARIES = (132, 1024, 5003)


@cache
def drawer(vocab: int, threads: int = 1, isa: str = "") -> CpuForward:
    found, _ = library_or_reason(isa)
    assert found is not None
    return CpuForward(Sequences(build(Sizes(vocab=vocab, layers=1, windows=(0,))), found, threads=threads).decoder)


def draw(seed: int = 7, length: int = 0, choice: int = 0, **changes: Any) -> Draw:
    return Draw(SamplingParams(**{"seed": seed, "max_tokens": 64, "temperature": 1.0, **changes}), choice, (4, 5), (0,) * length)


def tokens(logits: torch.Tensor, draws: list[Draw], by: CpuForward | None) -> list[int | None]:
    with np.errstate(over="ignore"):  # numpy says that -1e38 / 1e-5 is -inf
        return [each.token for each in sample(logits, draws, EOS, drawer=None if by is None else by.draw)]


def nearby(one: Draw, by: float) -> Draw:
    top_p = one.sampling.top_p
    return one if top_p >= 1 else replace(one, sampling=replace_params(one.sampling, top_p=min(max(top_p * (1 + by), 1e-12), 1 - 1e-12)))


def replace_params(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**{**{name: getattr(params, name) for name in params.__struct_fields__}, **changes})


def ugly(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    row = rng.standard_normal(vocab) * rng.choice([1e-4, 0.3, 1.0, 6.0, 300.0])
    if kind == "banned":
        row[rng.random(vocab) < rng.random()] = -np.inf
    elif kind == "one":
        row[np.arange(vocab) != rng.integers(vocab)] = -np.inf
    elif kind == "ties":
        row = rng.integers(0, 4, vocab) * 1.5
    elif kind == "flat":
        row = np.zeros(vocab)
    elif kind == "masked":
        row[rng.random(vocab) < 0.9] = rng.choice([-1e9, -1e30, -3e38])
    elif kind == "huge":
        row *= 1e35
    row[rng.integers(vocab)] = row.max() if np.isfinite(row.max()) else 0.0
    return row.astype(np.float32)


KINDS = ("plain", "banned", "one", "ties", "flat", "masked", "huge")
ASKED = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "temperature": st.sampled_from([1e-5, 0.01, 0.7, 1.0, 2.0, 50.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 40, 131, 132, 5003, 10**9]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
        "min_p": st.sampled_from([0.0, 1e-30, 0.01, 0.3, 1.0]),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "choice": st.integers(0, 5),
        "length": st.integers(0, 50),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(VOCABULARIES), st.lists(ASKED, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_as_numpy_draws(vocab: int, asked: list[dict[str, Any]], seed: int) -> None:
    """The filters' own choices and the draw; alone the same bits as in company, on one thread as on two."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(np.stack([ugly(each["kind"], vocab, rng) for each in asked]))
    draws = [draw(**{name: value for name, value in each.items() if name != "kind"}) for each in asked]
    found = tokens(logits, draws, drawer(vocab))
    assert found == tokens(logits, draws, drawer(vocab, threads=2))
    assert found == [tokens(logits[i : i + 1], [one], drawer(vocab))[0] for i, one in enumerate(draws)]
    allowed = zip(*(tokens(logits, [nearby(one, by) for one in draws], None) for by in (-EDGE, 0.0, EDGE)), strict=True)
    assert all(token in near for token, near in zip(found, allowed, strict=True)), (found, draws)


@pytest.mark.parametrize("temperature", [0.8, 1.0, 3.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.7}, {"min_p": 0.05}], ids=str)
def test_the_same_tokens_of_usual_logits(temperature: float, filters: dict[str, Any]) -> None:
    logits = torch.randn(64, 5003, generator=torch.Generator().manual_seed(1)) * 3
    draws = [draw(seed=i, length=i % 9, temperature=temperature, **filters) for i in range(64)]
    found = tokens(logits, draws, drawer(5003))
    assert found == tokens(logits, draws, None)
    assert found != tokens(logits, [draw(seed=i + 1, length=i % 9, temperature=temperature, **filters) for i in range(64)], None)


def test_an_edge_that_is_off_would_be_noticed() -> None:
    """The control of the tolerance above: a little more of top-p is another token somewhere."""
    logits = torch.randn(64, 5003, generator=torch.Generator().manual_seed(1))
    draws = [draw(seed=i, top_p=0.9) for i in range(64)]
    assert tokens(logits, draws, drawer(5003)) != tokens(logits, [nearby(one, 0.02) for one in draws], None)


@pytest.mark.slow
def test_other_instructions_draw_the_same() -> None:
    logits = torch.randn(64, 5003, generator=torch.Generator().manual_seed(1)) * 2
    draws = [draw(seed=i, top_p=0.9 if i % 2 else 1.0, top_k=300 if i % 3 else 0, min_p=0.001 * (i % 4)) for i in range(64)]
    assert tokens(logits, draws, drawer(5003, isa="avx2")) == tokens(logits, draws, drawer(5003)) == tokens(logits, draws, None)


def test_rows_that_fail_fail_alone_and_rules_are_kept() -> None:
    logits = torch.randn(4, 132)
    logits[1, 3], logits[2] = float("nan"), float("-inf")
    draws = [draw(), draw(), draw(), draw(seed=9, allowed_token_ids=(11, 12), top_p=0.9)]
    outcomes = sample(logits, draws, EOS, drawer=drawer(132).draw)
    assert [bool(each.error) for each in outcomes] == [False, True, True, False] and outcomes[3].token in (11, 12)
    assert [each.token for each in outcomes] == tokens(logits, draws, None)


WRONG = [{"row": 2}, {"row": -1}, {"best_token": 132}, {"best_token": -1}, {"temperature": 0.0}, {"temperature": np.nan}, {"best": np.inf}]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_nothing_wrong_is_drawn_from(change: dict[str, float]) -> None:
    fine = dict.fromkeys(DRAW.names or (), 0.0) | {"temperature": 1.0, "top_p": 1.0}
    logits = np.zeros((2, 132), np.float32)
    decoder = drawer(132).decoder
    assert 0 <= decoder.draw(logits, np.array([tuple(fine.values())], DRAW))[0] < 132
    with pytest.raises(StepFault, match="a draw from a row"):
        decoder.draw(logits, np.array([tuple({**fine, **change}.values())], DRAW))
