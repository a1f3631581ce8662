"""The fused sampler in Triton's interpreter against the sampler on the CPU, token for token, and against its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels.reference.sampling as reference
import kernels.triton.sampling as file
import kernels.triton.sampling_draw as draw_file
import kernels.triton.sampling_filters as filters_file
import kernels.triton.sampling_rules as rules_file
import tests.kernels.triton_interpreter  # noqa: F401  kernels are interpreted
from kernels.errors import KernelError
from kernels.reference.sampling import Sampled, SamplingRows, Status, TokenLists
from replica.sampler import sample
from replica.step import Draw, Outcome
from tests.kernels.asked_rows import EOS, Mask, draw, rows_of
from tests.kernels.mutation import mutated
from tests.kernels.paged_rows import Poison
from tests.kernels.triton_memory import counted

pytestmark = pytest.mark.patient

NAN, INFINITY = float("nan"), float("inf")
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_p": 0.95, "top_k": 300},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_p": 0.9999999},
    {"min_p": 1.0},
    {"temperature": 60.0, "top_p": 0.5},  # so flat that all tokens are candidates
    {"temperature": 0.02, "top_p": 0.9},
]
RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 0.5, "presence_penalty": -1.5},
    {"logit_bias": ((3, 30.0), (0, -5.0), (999, 2.5), (17, 1e-3))},
    {"logit_bias": ((9, 0.1), (9, 1e5), (9, -1e5))},  # added in the order given
    {"bad_words": ((7, 8, 3), (6,)), "min_tokens": 9, "stop_token_ids": (11, 12)},
    {"allowed_token_ids": (1, 2, 3, 500, 999, 5000, -1)},
    {"mask": "every third", "repetition_penalty": 1.1, "logit_bias": ((2, 50.0), (6, 4.0)), "top_p": 0.8, "temperature": 1.4},
]


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with Poison():
        yield


def logits_for(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def compare(logits: Tensor, draws: Sequence[Draw], sampled: Sampled) -> list[Outcome]:
    """Everything that the sampler on the CPU says, the kernels say too: tokens exactly, log probabilities but for rounding."""
    right = sample(logits, draws, EOS)
    for row, outcome in enumerate(right):
        status = Status(int(sampled.statuses[row]))
        assert (status is not Status.FINE) == bool(outcome.error), f"row {row}: {status!r}, {outcome.error}"
        assert int(sampled.tokens[row]) == (outcome.token or 0), f"row {row}: {draws[row].sampling}"
        if outcome.logprobs is not None:
            assert float(sampled.logprobs[row]) == pytest.approx(outcome.logprobs.logprob, abs=1e-4)
            ids, values = zip(*outcome.logprobs.top, strict=True)
            assert tuple(sampled.top_tokens[row].tolist()) == ids
            assert sampled.top_logprobs[row].tolist() == pytest.approx(values, abs=1e-4)
    return right


def check(logits: Tensor, draws: Sequence[Draw], top: int = 0) -> Sampled:
    before = logits.clone()
    sampled = file.sampling(logits, rows_of(draws, logits.shape[1]), top)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits are left as they are"
    compare(logits, draws, sampled)
    return sampled


@pytest.mark.parametrize(("rows", "vocab"), [(1, 49152), (3, 4097), (17, 1000), (2, 31)])
def test_draws_are_those_of_the_cpu(rows: int, vocab: int) -> None:
    changes = [{"seed": 100 + row, "choice": row % 3, "temperature": 0.9, "logprobs": 5} for row in range(rows)]
    check(logits_for(rows, vocab), [draw(**change) for change in changes], top=5)


@pytest.mark.parametrize("vocab", [1000, 4099])
def test_filters_are_those_of_the_cpu(vocab: int) -> None:
    draws = [
        draw(seed=seed, **{"temperature": 1.0, **filters}) for filters in FILTERS for seed in ((1 << 63) - 1, -5)[: 1 + (vocab < 4096)]
    ]
    check(logits_for(len(draws), vocab, seed=1), draws)


def test_a_whole_vocabulary_is_filtered() -> None:
    check(logits_for(2, 49152, seed=2), [draw(temperature=0.8, top_p=0.9), draw(temperature=1.0, top_k=50, top_p=0.95)])


def asked(rules: dict[str, Any], vocab: int, temperature: float) -> Draw:
    changes = {"temperature": temperature, **rules}
    if changes.pop("mask", None):
        changes["mask"] = Mask(vocab)
    return draw(prompt=(1, 2, 3, 900), output=(4, 4, 7, 8, 4, 500, 7, 8), seed=3, **changes)


def test_rules_are_those_of_the_cpu() -> None:
    draws = [asked(rules, 1000, temperature) for rules in RULES for temperature in (0.0, 1.0)]
    logits = logits_for(len(draws), 1000, seed=3)
    sampled = check(logits, draws, top=2)
    without = sample(logits, [draw(temperature=0.0)] * len(draws), EOS)
    changed = sum(int(sampled.tokens[row]) != without[row].token for row in range(0, len(draws), 2))
    assert changed >= 4, "rules that change nothing prove nothing"


def test_equals() -> None:
    """The first of equals; a filter keeps what ties with the last one kept."""
    logits = logits_for(25, 500, seed=4).round()
    filters: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 3}, {"top_k": 20, "top_p": 0.5}, {"top_p": 0.3}, {"min_p": 0.1}]
    draws = [draw(seed=row, **{"temperature": 1.0, "logprobs": 0, **filters[row % 5]}) for row in range(25)]
    sampled = file.sampling(logits, rows_of(draws, 500), 8)
    for row, outcome in enumerate(sample(logits, draws, EOS)):
        assert int(sampled.tokens[row]) == outcome.token
        best_first = sorted(range(500), key=lambda token, row=row: (-float(logits[row, token]), token))[:8]
        assert sampled.top_tokens[row].tolist() == best_first
    flat = torch.zeros(2, 500)
    assert check(flat, [draw(), draw(temperature=1.0, top_k=1)], top=3).tokens[0] == 0


def test_what_is_not_finite_ends_its_row_alone() -> None:
    logits = logits_for(8, 700, seed=5)
    logits[1, 699] = NAN
    logits[2, 3] = INFINITY
    logits[3] = -INFINITY
    logits[4, 10:] = -INFINITY
    plain = {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}
    draws = [draw(**plain) for _ in range(5)]
    draws += [draw(mask=Mask(700, step=0), **plain), draw(allowed_token_ids=(9000,), **plain), draw(repetition_penalty=1e30, **plain)]
    sampled = check(logits, draws, top=2)
    assert sampled.statuses.tolist() == [0, 1, 1, 1, 0, 2, 2, 0]
    assert int(sampled.top_tokens.min()) >= 0 and int(sampled.top_tokens.max()) < 700
    alone = file.sampling(logits[:1], rows_of(draws[:1], 700), 2)
    assert int(alone.tokens[0]) == int(sampled.tokens[0])


def test_bans_that_leave_nothing_are_lifted() -> None:
    logits = logits_for(3, 300, seed=6)
    words = ((17,), (200,), (3,))
    draws = [
        draw(allowed_token_ids=(17, 200), bad_words=words),
        draw(allowed_token_ids=(17, 200), bad_words=words[:1], temperature=1.0),
        draw(allowed_token_ids=(2,), min_tokens=5, temperature=1.0, top_p=0.5),
    ]
    sampled = check(logits, draws)
    assert int(sampled.tokens[1]) == 200 and int(sampled.tokens[2]) == 2


def test_ids_outside_the_vocabulary_say_nothing() -> None:
    """And nothing is written where they point: the neighbour's row, or beyond the last."""
    logits = logits_for(2, 100, seed=12)
    best = int(logits[1].argmax())
    ids = torch.tensor([-100, best - 100, 100 + best, 1 << 30] * 2, dtype=torch.int32).view(2, 4).sort().values.flatten()
    lists = TokenLists(torch.tensor([0, 4, 8], dtype=torch.int32), ids, torch.full((8,), 9.0))
    plain = rows_of([draw(), draw(temperature=1.0, top_p=0.9)], 100)
    said = file.sampling(logits, replace(plain, bias=lists, banned=lists))
    wanted = file.sampling(logits, plain)
    assert torch.equal(said.tokens, wanted.tokens) and torch.equal(said.logprobs, wanted.logprobs)
    defined = reference.sampling(logits, replace(plain, bias=lists, banned=lists))
    assert torch.equal(defined.tokens, wanted.tokens)
    broken = replace(plain, numbers=torch.full_like(plain.numbers, NAN))
    assert file.sampling(logits, broken).tokens.tolist() == logits.argmax(1).tolist()


def test_a_row_alone_is_the_row_in_a_batch_bit_for_bit() -> None:
    vocab = 5000
    draws = [draw(seed=row, choice=row, **{"temperature": 1.0, **FILTERS[row % len(FILTERS)]}) for row in range(10)]
    draws += [asked(rules, vocab, 0.9) for rules in RULES]
    logits = logits_for(len(draws), vocab, seed=7)
    rows = rows_of(draws, vocab)
    together = file.sampling(logits, rows, 3)
    for row in (0, 5, 11, 17):
        alone = file.sampling(logits[row : row + 1].contiguous(), rows_of(draws[row : row + 1], vocab), 3)
        for ours, all_of_them in (
            (alone.tokens, together.tokens),
            (alone.logprobs, together.logprobs),
            (alone.top_tokens, together.top_tokens),
            (alone.top_logprobs, together.top_logprobs),
        ):
            assert torch.equal(ours, all_of_them[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_logits_count_as_what_they_are(dtype: torch.dtype) -> None:
    short = logits_for(4, 1000, seed=8).to(dtype)
    draws = [draw(seed=row, temperature=1.0, top_p=0.9 if row % 2 else 1.0, presence_penalty=0.5 * (row > 1)) for row in range(4)]
    compare(short.float(), draws, file.sampling(short, rows_of(draws, 1000)))


def test_the_definition_in_float64_says_the_same() -> None:
    draws = [draw(seed=row, **{"temperature": 1.0, **filters}) for row, filters in enumerate(FILTERS)]
    draws += [asked(rules, 1000, 0.8) for rules in RULES]
    logits, rows = logits_for(len(draws), 1000, seed=9), rows_of(draws, 1000)
    compare(logits, draws, reference.sampling(logits, rows, 0))
    ours, right = file.sampling(logits, rows, 4), reference.sampling(logits.double(), rows, 4)
    assert torch.equal(ours.tokens, right.tokens) and torch.equal(ours.top_tokens, right.top_tokens)
    assert torch.allclose(ours.logprobs, right.logprobs, atol=1e-5) and torch.allclose(ours.top_logprobs, right.top_logprobs, atol=1e-5)


@pytest.mark.parametrize(("filters", "rows"), [({}, 150), ({"top_k": 5}, 50)], ids=["whole", "top-k"])
def test_draws_follow_the_distribution(filters: dict[str, Any], rows: int) -> None:
    """χ² over five tokens of positions and seeds that are fixed."""
    logits = torch.full((1, 20), -8.0)
    logits[0, :5] = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0])
    draws = [draw(output=(1,) * (row % 50), seed=row // 50, temperature=0.8, **filters) for row in range(rows)]
    drawn = file.sampling(logits.expand(rows, -1).contiguous(), rows_of(draws, 20)).tokens
    shares = (logits[0, :5] / 0.8).softmax(0).double()
    counts = torch.bincount(drawn, minlength=20)[:5].double()
    assert float(((counts - rows * shares) ** 2 / (rows * shares)).sum()) < 18.5, "99.9 % of χ² with 4 degrees of freedom"


def test_no_rows_and_what_is_not_served() -> None:
    nobody = SamplingRows(torch.empty(0, 6, dtype=torch.float64), torch.empty(0, 4, dtype=torch.int64))
    assert file.sampling(torch.empty(0, 50), nobody, 2).tokens.shape == (0,)
    with pytest.raises(KernelError, match="sizes up to 262144"):
        file.sampling(torch.empty(1, 300_000), rows_of([draw()], 50))


def test_bytes_are_those_of_the_docstring() -> None:
    """A greedy row reads its logits once; a drawn one twice, a filtered one three times; state and parts are little beside them."""
    vocab = 40_000
    for changes, passes in (({}, 1), ({"temperature": 1.0}, 2), ({"temperature": 1.0, "top_k": 4}, 3)):
        with counted() as moved:
            file.sampling(logits_for(1, vocab), rows_of([draw(**changes)], vocab))
        assert passes * 4 * vocab <= moved.read < passes * 4 * vocab + 25_000


@pytest.mark.parametrize(
    ("module", "kernel", "old", "new", "changes"),
    [
        (rules_file, "rules_kernel", "inside = token < vocab\n    raw", "inside = token < vocab - 1\n    raw", {}),
        (draw_file, "draw_kernel", "inside = token < vocab\n", "inside = token < vocab - 1\n", {"temperature": 1.0}),
        (filters_file, "gather_kernel", "BINS) <= last)", "BINS) < last)", {"temperature": 1.0, "top_k": 2}),
        (filters_file, "choose_kernel", "key_of(values) <= last", "key_of(values) < last", {"temperature": 1.0, "top_k": 2}),
    ],
    ids=["rules", "draw", "gather", "choose"],
)
def test_the_check_sees_what_is_wrong_at_the_end(
    module: Any, kernel: str, old: str, new: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_for(4, 4100, seed=10)
    logits[:, 4099] = 40.0  # the last token of the last chunk
    if "top_k" in changes:
        logits[:, 4098] = 40.2  # the last of the two that stay
    draws = [draw(seed=seed, **changes) for seed in range(4)]
    check(logits, draws)
    monkeypatch.setattr(file, kernel, getattr(mutated(module, old, new, tmp_path), kernel))
    with pytest.raises(AssertionError):
        check(logits, draws)
    assert np.isfinite(logits.numpy()).all()
