"""Drawing: what a request asks for, the same token in every company, and failures that stay with their request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import replica.sampler
from kernels.reference.noise import complement, gumbel, noise_bits, stream_key
from replica.contract.messages import SamplingParams
from replica.filters import thresholds
from replica.sampler import check_finite, sample
from replica.step import Draw

EOS = frozenset({2})
V = 50


def draw(prompt: tuple[int, ...] = (4, 5), output: tuple[int, ...] = (), choice: int = 0, **changes: Any) -> Draw:
    return Draw(SamplingParams(**{"seed": 7, "max_tokens": 64, "temperature": 0.0, **changes}), choice, prompt, output)


def logits_for(rows: int, seed: int = 0, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def tokens(logits: torch.Tensor, *draws: Draw) -> list[int | None]:
    return [outcome.token for outcome in sample(logits, draws, EOS)]


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = logits_for(3)
    logits[1, 9] = logits[1, 30] = 50.0
    assert tokens(logits, draw(), draw(), draw(temperature=1e-9)) == [int(logits[0].argmax()), 9, int(logits[2].argmax())]


def test_a_row_draws_the_same_alone_in_a_batch_and_at_any_place() -> None:
    logits = logits_for(40, vocab=3000)
    draws = [
        draw(output=(1,) * (i % 5), seed=i % 3, choice=i % 4, temperature=1.2, top_p=0.9 if i % 2 else 1.0, top_k=7 * (i % 3))
        for i in range(40)
    ]
    together = tokens(logits, *draws)
    assert together == [tokens(logits[i : i + 1], draws[i])[0] for i in range(40)]
    order = list(reversed(range(40)))
    assert [together[i] for i in order] == tokens(logits[order], *(draws[i] for i in order))
    with_others = tokens(torch.cat((logits[:1], logits[:1])), draws[0], draw(temperature=0.0, logprobs=3, presence_penalty=1.0))
    assert with_others[0] == together[0]


def test_noise_depends_on_seed_choice_and_position_only() -> None:
    flat = torch.zeros(1, 100_000)

    def one(**changes: Any) -> int | None:
        return tokens(flat, draw(temperature=1.0, **changes))[0]

    assert one() == one() == one(prompt=(4,), output=(9,)), "the position counts, not where the prompt ends"
    different = {one(), one(seed=8), one(choice=1), one(output=(1,)), one(seed=-1), one(seed=2**63 - 1)}
    assert len(different) == 6


def test_the_stream_is_frozen() -> None:
    """A stream moved to a replica of the next release must go on as it began: these values never change."""
    assert stream_key(42, 0, 17) == 0xDEE3D6F2736F2D92
    assert np.round(gumbel(noise_bits(np.array([1, 2], np.uint64), np.array([0, 49151]))), 6).tolist() == [0.565335, 1.175154]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02])
    size = 20_000
    logits = (probabilities.log() * 0.7).repeat(size, 1)
    drawn = tokens(logits, *(draw(seed=i, temperature=0.7) for i in range(size)))
    frequency = np.bincount(np.array(drawn), minlength=5) / size
    assert np.abs(frequency - probabilities.numpy()).max() < 4 * (0.25 / size) ** 0.5


def test_noise_is_gumbels_over_tokens_positions_choices_and_seeds() -> None:
    """Mean, variance and a χ² test on 64 equally likely bins; what follows each other is uncorrelated."""
    size = 65_536
    tokens = np.arange(size)
    one = np.zeros(size, np.int64)
    streams = {
        "tokens": noise_bits(np.uint64(stream_key(1, 0, 5)), tokens),
        "positions": noise_bits(np.array([stream_key(1, 0, p) for p in range(size)], np.uint64), one),
        "choices": noise_bits(np.array([stream_key(1, c, 5) for c in range(size)], np.uint64), one),
        "seeds": noise_bits(np.array([stream_key(s, 0, 5) for s in range(size)], np.uint64), one),
    }
    for name, bits in streams.items():
        noise = gumbel(bits)
        assert abs(noise.mean() - 0.5772) < 5 * 1.283 / size**0.5 and abs(noise.var() - np.pi**2 / 6) < 0.06, name
        counts = np.bincount((np.exp(-np.exp(-noise)) * 64).astype(int), minlength=64)
        assert ((counts - size / 64) ** 2 / (size / 64)).sum() < 120, name  # 63 degrees of freedom: p < 1e-5 beyond
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 5 / size**0.5, name
    across = np.corrcoef(gumbel(streams["tokens"]), gumbel(noise_bits(np.uint64(stream_key(1, 0, 6)), tokens)))[0, 1]
    assert abs(across) < 5 / size**0.5, "the next position's noise is another"


def test_the_bound_on_noise_holds_at_both_ends() -> None:
    bits = np.concatenate([np.arange(1000), 2**32 - 1 - np.arange(1000), np.arange(0, 2**32, 2**22)]).astype(np.uint64)
    assert np.isfinite(gumbel(bits)).all()
    assert (np.exp(gumbel(bits)) * replica.sampler.ROUNDING <= 1 / complement(bits).astype(np.float64)).all()


def test_only_rivals_need_noise_and_the_draw_is_that_of_all() -> None:
    logits = (logits_for(200, vocab=400) * 2).numpy()
    draws = [draw(seed=i, temperature=(0.3, 1.0, 5.0)[i % 3]) for i in range(200)]
    scaled = (logits - logits.max(axis=1)[:, None]) / np.array([[one.sampling.temperature] for one in draws], np.float32)
    keys = np.array([[stream_key(one.sampling.seed, 0, 2)] for one in draws], np.uint64)
    bits = noise_bits(np.repeat(keys, 400, axis=1), np.tile(np.arange(400), (200, 1)))
    assert tokens(torch.from_numpy(logits), *draws) == (scaled.astype(np.float64) + gumbel(bits)).argmax(axis=1).tolist()
    leaders = (np.exp(scaled) / complement(bits)).argmax(axis=1).tolist()
    assert tokens(torch.from_numpy(logits), *draws) != leaders, "the bound alone would draw others"


def test_choices_of_one_seed_differ_and_repeat() -> None:
    logits = logits_for(1).repeat(4, 1)
    choices = [
        [tokens(logits, *(draw(choice=c, output=(0,) * p, temperature=1.2) for c in range(4)))[c] for p in range(12)] for c in range(4)
    ]
    assert len({tuple(choice) for choice in choices}) == 4
    assert choices[0] == [tokens(logits[:1], draw(output=(0,) * p, temperature=1.2))[0] for p in range(12)]


def test_without_the_choice_in_the_key_they_would_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    key = replica.sampler._key
    monkeypatch.setattr(replica.sampler, "_key", lambda draw: key(replace(draw, choice=0)))
    with pytest.raises(AssertionError):
        test_choices_of_one_seed_differ_and_repeat()


def possible(logits: torch.Tensor, **changes: Any) -> set[int | None]:
    """All tokens that come over many seeds."""
    return set(tokens(logits.repeat(400, 1), *(draw(seed=i, temperature=1.0, **changes) for i in range(400))))


def test_top_k_top_p_and_min_p_keep_what_they_should() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]).log()
    assert possible(logits) == {0, 1, 2, 3, 4}
    assert possible(logits, top_k=2) == {0, 1}
    assert possible(logits, top_k=10**9) == possible(logits, top_k=-1) == {0, 1, 2, 3, 4}
    assert possible(logits, top_p=0.71) == {0, 1, 2}
    assert possible(logits, top_p=0.39) == {0}
    assert possible(logits, top_k=3, top_p=0.8) == {0, 1}  # 0.7 of 0.85 is 0.82
    assert possible(logits, min_p=0.3) == {0, 1, 2}
    assert possible(logits, min_p=0.5, top_p=0.57) == {0}  # 0.4 of 0.7 is 0.571: top-p counts what min-p left, as vLLM's does
    assert possible(logits, min_p=0.3, top_p=0.83, top_k=4) == {0, 1, 2}
    assert possible(logits, min_p=1.0) == possible(logits, top_p=1e-9) == possible(logits, top_k=1) == {0}
    assert possible(logits, top_k=1, top_p=1e-9, min_p=1.0) == {0}


def test_a_filter_that_keeps_nothing_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the best token is the floor's upper bound."""
    monkeypatch.setattr("replica.sampler.thresholds", lambda scaled, params: np.full(len(params), 1e-3, np.float32))
    with pytest.raises(ValueError, match="empty sequence"):
        possible(torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]).log(), top_k=1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(2, 3000), st.floats(0.01, 2.0), st.integers(-1, 3500), st.floats(0.001, 1.0), st.floats(0.0, 1.0)
)
def test_filters_equal_their_definition(seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Against a plain sort: the kept set is the definition's, but for ties with its last and rounding at its edge."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocab) * rng.choice([0.01, 1.0, 5.0])).astype(np.float32)
    scaled = (logits - logits.max()) / np.float32(temperature)
    params = SamplingParams(seed=0, max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    least = thresholds(scaled[None], [params])[0]
    assert scaled.max() >= least, "the best token stays"
    order = np.argsort(-scaled, kind="stable")
    ranked = scaled[order].astype(np.float64)
    floor = np.float32(np.log(min_p)) if min_p > 0 else np.float32(-np.inf)
    count = min(top_k if 0 < top_k < vocab else vocab, int((ranked >= floor).sum()))
    mass = np.exp(ranked[:count]).cumsum()
    if top_p < 1.0:
        count = int(np.searchsorted(mass, top_p * mass[-1] * (1 - 1e-6))) + 1
        more = int(np.searchsorted(mass, top_p * mass[-1] * (1 + 1e-6))) + 1
    else:
        more = count
    kept = int((scaled >= least).sum())
    ties = int((ranked == ranked[min(more, vocab) - 1]).sum())
    assert count <= kept <= more + ties


@pytest.mark.parametrize("vocab", [50, 63, 64, 65, 1000, 4096 + 17])
def test_top_k_of_rows_of_every_size_and_with_ties(vocab: int) -> None:
    """The k-th largest is what a sort says, whatever of the row is banned, doubled or sorted already."""
    rng = np.random.default_rng(vocab)
    rows = [np.sort(rng.standard_normal(vocab)), rng.integers(0, 9, vocab), np.where(rng.random(vocab) < 0.9, -np.inf, rng.random(vocab))]
    for row in rows:
        scaled = (row - row.max()).astype(np.float32)
        for top_k in (1, 2, 40, vocab // 64, vocab // 64 + 1, vocab - 1):
            params = SamplingParams(seed=0, max_tokens=1, top_k=max(top_k, 1))
            assert thresholds(scaled[None], [params])[0] == np.sort(scaled)[::-1][max(top_k, 1) - 1]


def test_flat_rows_are_looked_at_whole() -> None:
    scaled = -np.arange(5000, dtype=np.float32)[None] * np.float32(1e-4)
    least = thresholds(scaled, [SamplingParams(seed=0, max_tokens=1, top_p=0.9)])[0]
    mass = np.exp(scaled[0].astype(np.float64)).cumsum() / np.exp(scaled[0].astype(np.float64)).sum()
    assert abs(int((scaled >= least).sum()) - int(np.searchsorted(mass, 0.9)) - 1) <= 1


def test_rows_that_are_not_finite_fail_alone() -> None:
    logits = logits_for(5)
    logits[1, 7] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = float("-inf")
    outcomes = sample(logits, [draw(), draw(), draw(temperature=1.0), draw(temperature=1.0), draw(temperature=1.0, logprobs=2)], EOS)
    assert [bool(outcome.error) for outcome in outcomes] == [False, True, True, True, False]
    assert [outcome.token is None for outcome in outcomes] == [False, True, True, True, False]
    assert [bool(outcome.error) for outcome in check_finite(logits)] == [False, True, True, True, False]


def test_a_rule_hides_no_broken_row() -> None:
    """Every rank has to judge a row alike, and those that do not draw know no rules."""
    logits = logits_for(2)
    logits[0, 7] = float("nan")
    logits[1, 7] = float("inf")
    only = draw(allowed_token_ids=(3, 4))
    assert [bool(outcome.error) for outcome in sample(logits, [only, only], EOS)] == [True, True]


def test_rules_that_fail_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(logits: Any, one: Draw, eos: Any) -> None:
        if one.sampling.seed == 13:
            raise ValueError("a hook failed")

    monkeypatch.setattr(replica.sampler, "apply_rules", broken)
    logits = logits_for(3)
    outcomes = sample(logits, [draw(), draw(seed=13, presence_penalty=1.0), draw(temperature=1.0, presence_penalty=1.0)], EOS)
    assert "a hook failed" in outcomes[1].error and outcomes[1].token is None
    assert outcomes[0].token is not None and outcomes[2].token is not None


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = logits_for(3)
    logits[0, 11] = float("-inf")
    right = logits.log_softmax(-1)
    plain, forced, silent = sample(
        logits, [draw(logprobs=3, temperature=0.5, top_k=1), draw(logprobs=0, allowed_token_ids=(3,)), draw()], EOS
    )
    assert plain.logprobs is not None and forced.logprobs is not None and silent.logprobs is None
    assert plain.logprobs.token_id == plain.token
    assert abs(plain.logprobs.logprob - float(right[0, plain.token or 0])) < 1e-5
    assert [token for token, _ in plain.logprobs.top] == right[0].topk(3).indices.tolist()
    assert forced.token == 3 and forced.logprobs.top == () and abs(forced.logprobs.logprob - float(right[1, 3])) < 1e-5
    impossible = sample(logits[:1], [draw(logprobs=V, allowed_token_ids=(11, 12))], EOS)[0].logprobs
    assert impossible is not None and dict(impossible.top)[11] == -9999.0
    assert all(np.isfinite(value) for _, value in impossible.top)


def test_logits_are_left_as_they_were() -> None:
    logits = logits_for(4)
    before = logits.clone()
    sample(logits, [draw(logit_bias=((3, 5.0),)), draw(temperature=0.7, top_p=0.5), draw(min_tokens=4), draw(logprobs=3)], EOS)
    assert torch.equal(logits, before)
