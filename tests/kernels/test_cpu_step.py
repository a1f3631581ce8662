"""The C++ step: what it computes, that a token's bits do not depend on its company, and that nothing wrong reaches the kernel."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.batch import PagedBatch
from kernels.cpu.build import ISAS, cache_directory, library_path
from kernels.cpu.decoder import StepFault
from tests.kernels.plain_decoder import BLOCK, POSITIONS, Plain, Sequences, Sizes, build, library_or_reason, logits_of

ISA, REASON = library_or_reason()
pytestmark = pytest.mark.skipif(ISA is None, reason=f"no C++ step here: {REASON}")
RELATIVE_ERROR_MAX = {"bf16": 1e-2, "q8": 3e-2, "q4": 3e-2}  # of logits, by norm; int8 activations cost the difference
LLAMA, QWEN2, QWEN3 = Sizes(), Sizes(bias=True, tied=False, heads=4), Sizes(head_norms=True, heads=2, dim=64)
MISTRAL = Sizes(windows=(40, 0), heads=8, kv_heads=1, vocab=160)
KINDS = [Sizes(), Sizes(kind="q8", bias=True), Sizes(kind="q4", tied=False)]
LONG_SUMS = [Sizes(kind=kind, hidden=640, width=1184, layers=1, windows=(0,), bias=True) for kind in ("bf16", "q8", "q4")]
INT8_CACHES = [Sizes(int8_cache=True), Sizes(int8_cache=True, windows=(40, 0), heads=8, kv_heads=1, dim=64, vocab=160)]
INT8_CACHE_ERROR_MAX = 2e-2
# Scores of hundreds: keys of a later block outweigh all before by e^28 and more.
SHARP = Sizes(sharpness=80.0, layers=1, windows=(0,), dim=64)
SHARP_ERROR_MAX = 6e-2  # a rounding of such a score changes its weight by half


def tokens_of(count: int, vocab: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(count)]


def relative_error(found: torch.Tensor, meant: torch.Tensor) -> float:
    return float((found.double() - meant).norm() / meant.norm())


@pytest.mark.parametrize("sizes", [LLAMA, QWEN2, QWEN3, MISTRAL, *KINDS[1:]], ids=str)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 150, 280])
def test_logits_of_a_prompt(sizes: Sizes, length: int) -> None:
    assert ISA is not None
    plain = build(sizes)
    tokens = tokens_of(length, sizes.vocab)
    sequences = Sequences(plain, ISA)
    found = sequences.step([(tokens, 0, sequences.table())])
    meant = logits_of(plain, tokens)
    assert relative_error(found.logits, meant) < RELATIVE_ERROR_MAX[sizes.kind]
    assert found.best.tolist() == found.logits.argmax(-1).tolist()
    assert found.best_logits.tolist() == found.logits.amax(-1).tolist()
    assert torch.equal(sequences.decoder.logits(found.hidden), found.logits)


@pytest.mark.parametrize("sizes", KINDS, ids=str)
def test_a_product_is_exact_but_for_the_rounding_of_its_input(sizes: Sizes) -> None:
    """The head alone, against float64 with the activations rounded as the step rounds them."""
    assert ISA is not None
    plain = build(sizes)
    hidden = torch.randn(21, sizes.hidden, generator=torch.Generator().manual_seed(3))
    normed = hidden.double() / (hidden.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * plain.vectors["norm"].double()
    if sizes.kind == "bf16":
        rounded = normed.float().bfloat16().double()
    else:
        groups = normed.float().unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        rounded = ((groups / scale).round() * scale).flatten(-2).double()
    meant = rounded @ plain.matrices["head"].T
    assert relative_error(Sequences(plain, ISA).decoder.logits(hidden), meant) < 3e-4  # some inputs lie between two roundings


def test_logits_where_later_keys_outweigh_all_before() -> None:
    assert ISA is not None
    tokens, sequences = tokens_of(280, SHARP.vocab), Sequences(build(SHARP), ISA)
    found = sequences.step([(tokens, 0, sequences.table())]).logits
    assert relative_error(found, logits_of(build(SHARP), tokens)) < SHARP_ERROR_MAX
    other = logits_of(build(replace(SHARP, sharpness=20.0)), tokens)  # the control: weights that are blurred are seen
    assert relative_error(found, other) > SHARP_ERROR_MAX


def test_another_window_is_another_result() -> None:
    """The control of the windows above: a window that is off by one is seen."""
    assert ISA is not None
    tokens = tokens_of(64, 160)
    sequences = Sequences(build(MISTRAL), ISA)
    found = sequences.step([(tokens, 0, sequences.table())]).logits
    for window in (39, 41):
        meant = logits_of(build(Sizes(windows=(window, 0), heads=8, kv_heads=1, vocab=160)), tokens)
        assert relative_error(found[45:], meant[45:]) > RELATIVE_ERROR_MAX["bf16"]


def in_chunks(sequences: Sequences, tokens: list[int], chunk: int) -> torch.Tensor:
    table = sequences.table()
    parts = [sequences.step([(tokens[at : at + chunk], at, table)]).logits for at in range(0, len(tokens), chunk)]
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", INT8_CACHES, ids=str)
@pytest.mark.parametrize("length", [1, 17, 65, 150])
def test_logits_over_an_int8_cache(sizes: Sizes, length: int) -> None:
    assert ISA is not None
    plain, tokens = build(sizes), tokens_of(length, sizes.vocab)
    sequences = Sequences(plain, ISA)
    meant = logits_of(plain, tokens)
    assert relative_error(sequences.step([(tokens, 0, sequences.table())]).logits, meant) < INT8_CACHE_ERROR_MAX
    if length > 17:  # the control: scales that belong to other tokens are seen
        table = sequences.table()
        sequences.step([(tokens[:-1], 0, table)], wanted=[])
        sequences.pool[:, table[0]] = sequences.pool[:, table[1]]
        found = sequences.step([(tokens[-1:], length - 1, table)]).logits
        assert relative_error(found, meant[-1:]) > INT8_CACHE_ERROR_MAX


def same_bits(sizes: Sizes, length: int, chunks: Sequence[int]) -> None:
    assert ISA is not None
    tokens = tokens_of(length, sizes.vocab)
    sequences = Sequences(build(sizes), ISA)
    whole = in_chunks(sequences, tokens, length)
    for chunk in chunks:
        assert torch.equal(in_chunks(sequences, tokens, chunk), whole), chunk


@pytest.mark.parametrize("sizes", [*KINDS, MISTRAL, *INT8_CACHES], ids=str)
def test_the_same_bits_whatever_the_chunks(sizes: Sizes) -> None:
    same_bits(sizes, 150, (1, 7, 16, 61))


@pytest.mark.parametrize("sizes", [*LONG_SUMS, MISTRAL, SHARP, *INT8_CACHES], ids=str)
def test_the_same_bits_where_sums_and_keys_are_taken_in_parts(sizes: Sizes) -> None:
    """K and contexts longer than what is multiplied at once."""
    same_bits(sizes, 280, (7, 33, 200))


@pytest.mark.parametrize("sizes", [*KINDS, *LONG_SUMS], ids=str)
def test_the_same_bits_of_more_rows_than_a_matrix_passes_at_once(sizes: Sizes) -> None:
    assert ISA is not None
    decoder = Sequences(build(sizes), ISA).decoder
    hidden = torch.randn(1100, sizes.hidden, generator=torch.Generator().manual_seed(5))
    whole = decoder.logits(hidden)
    for first, last in ((0, 1), (500, 533), (512, 1100)):
        assert torch.equal(decoder.logits(hidden[first:last]), whole[first:last])


@pytest.mark.parametrize("sizes", [*KINDS, *INT8_CACHES], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bits_in_company(sizes: Sizes, threads: int) -> None:
    """Decodes and chunks of many lengths together, on any number of threads, against each alone on two."""
    assert ISA is not None
    plain = build(sizes)
    prompts = [tokens_of(length, sizes.vocab, length) for length in (1, 2, 5, 16, 31, 64, 90, 130)]
    alone = Sequences(plain, ISA, threads=2, pages=200)
    apart = [alone.step([(prompt, 0, alone.table())]).logits for prompt in prompts]
    together = Sequences(plain, ISA, threads=threads, pages=200)
    tables = [together.table() for _ in prompts]
    for prompt, table in zip(prompts[4:], tables[4:], strict=True):
        together.step([(prompt[:-1], 0, table)], wanted=[])
    rows = [(prompt, 0, table) for prompt, table in zip(prompts[:4], tables[:4], strict=True)]
    rows += [(prompt[-1:], len(prompt) - 1, table) for prompt, table in zip(prompts[4:], tables[4:], strict=True)]
    order = random.Random(threads).sample(range(len(rows)), len(rows))
    found = together.step([rows[i] for i in order]).logits.split([len(rows[i][0]) for i in order])
    for place, i in enumerate(order):
        assert torch.equal(found[place], apart[i][-len(rows[i][0]) :]), i


@pytest.mark.parametrize("sizes", [LLAMA, *INT8_CACHES], ids=str)
def test_what_stands_in_other_pages_is_not_read(sizes: Sizes) -> None:
    assert ISA is not None
    sequences = Sequences(build(sizes), ISA)
    tokens, table = tokens_of(70, LLAMA.vocab), sequences.table()
    clean = sequences.step([(tokens, 0, table)]).logits
    others = [page for page in range(sequences.pool.shape[1]) if page not in table]
    sequences.spoil(others)
    assert torch.equal(sequences.step([(tokens, 0, table)]).logits, clean)


def test_a_row_that_is_not_finite_is_alone_with_it() -> None:
    assert ISA is not None
    for sizes in [*KINDS, *INT8_CACHES]:
        sequences = Sequences(build(sizes), ISA)
        broken, sound = sequences.table(), sequences.table()
        sequences.spoil(broken[:1])
        found = sequences.step([([3], 5, broken), ([3], 0, sound)])
        assert np.isnan(found.best_logits).tolist() == [True, False]
        assert found.hidden[0].isnan().any() and found.logits[1].isfinite().all()


@pytest.mark.parametrize(
    ("ids", "start", "count", "page", "wanted", "message"),
    [
        ([132], 0, 1, 3, [0], "token id"),
        ([-1], 0, 1, 3, [0], "token id"),
        ([2**32 + 1], 0, 1, 3, [0], "token id"),
        ([1], 0, 1, 128, [0], "page"),
        ([1], 0, 1, -1, [0], "page"),
        ([1], 16, 1, 3, [0], "position"),
        ([1], POSITIONS, 1, 3, [0], "position"),
        ([1], -1, 1, 3, [0], "shapes"),
        ([1], 0, 2, 3, [0], "shapes"),
        ([1], 0, 0, 3, [0], "shapes"),
        ([1], 2**31 - 1, 1, 3, [0], "position"),
        ([1], 0, 1, 3, [1], "place"),
        ([1], 0, 1, 3, [-1], "place"),
    ],
)
def test_nothing_wrong_reaches_the_kernel(ids: list[int], start: int, count: int, page: int, wanted: list[int], message: str) -> None:
    assert ISA is not None
    sequences = Sequences(build(LLAMA), ISA)
    sequences.pool[:] = 1
    batch = PagedBatch(np.array([start], np.int32), np.array([count], np.int32), np.array([[page]], np.int32))
    with pytest.raises(StepFault, match=message):
        sequences.decoder.step(np.array(ids, np.int64), batch, np.array(wanted, np.int32))
    assert bool((sequences.pool == 1).all())


def test_far_pages() -> None:
    """Offsets beyond 32 bits: 40,000 pages of one layer, of which three are touched."""
    assert ISA is not None
    sizes = Sizes(layers=1, windows=(0,), heads=8, kv_heads=4, dim=128)
    plain: Plain = build(sizes)
    sequences = Sequences(plain, ISA, pages=1)
    near = [sequences.step([(tokens_of(BLOCK, 132), 0, [0])]).logits]
    pages = 2**31 // (2 * 4 * BLOCK * 128 * 2) * 3
    far = Sequences(plain, ISA, pages=pages)
    assert far.pool.numel() > 2**31
    assert torch.equal(far.step([(tokens_of(BLOCK, 132), 0, [pages - 1])]).logits, near[0])


def test_a_team_that_cannot_have_all_its_threads_is_refused() -> None:
    assert ISA is not None
    command = [sys.executable, "-m", "tests.kernels.starved", str(library_path(ISA, cache_directory()))]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["no memory or no threads for the C++ step", "0", "True"], (done.returncode, done.stderr[-1000:])


@pytest.mark.slow
@pytest.mark.parametrize("name", [isa.name for isa in ISAS[1:]])
def test_other_instructions_compute_the_same_model(name: str) -> None:
    """Those that this CPU has beside its best; that their sources compile, test_cpu_build sees to."""
    isa, reason = library_or_reason(name)
    if isa is None or isa is ISA:
        pytest.skip(reason or f"{name} is the best this CPU has: all other tests here run on it")
    for sizes in [QWEN2, QWEN3, MISTRAL, SHARP, *KINDS, *INT8_CACHES]:
        plain, tokens = build(sizes), tokens_of(150, sizes.vocab)
        sequences = Sequences(plain, isa)
        whole = in_chunks(sequences, tokens, 150)
        most = SHARP_ERROR_MAX if sizes is SHARP else INT8_CACHE_ERROR_MAX if sizes.int8_cache else RELATIVE_ERROR_MAX[sizes.kind]
        assert relative_error(whole, logits_of(plain, tokens)) < most
        assert torch.equal(in_chunks(sequences, tokens, 7), whole)
