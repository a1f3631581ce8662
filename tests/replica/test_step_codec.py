"""Steps as bytes: what arrives is what was planned, small while decoding, and nothing wrong is ever carried out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.messages import SamplingParams
from replica.parallel.step_codec import DECODES, EXPECTED, HEADER_BYTES, SAME_ROWS, CodecError, Header, encode_stop, seal
from replica.parallel.step_decoder import StepDecoder
from replica.parallel.step_encoder import StepEncoder
from replica.step import BlockCopy, Draw, Row, Step
from tests.replica.step_wire import StepWire

BLOCK = 4
U32 = st.integers(0, 2**32 - 1)
DRAW = Draw(SamplingParams(seed=1, max_tokens=1), 0, [1], [])


@st.composite
def rows(draw: st.DrawFn) -> Row:
    start = draw(st.integers(0, 40))
    tokens = draw(st.lists(U32, min_size=1, max_size=9))
    pages = -(-(start + len(tokens)) // BLOCK)
    blocks = draw(st.lists(st.integers(0, 3), min_size=pages, max_size=pages + 2))  # few values: prefixes are shared often
    wants = DRAW if draw(st.booleans()) else None
    return Row(draw(st.integers(0, 3)), tokens, start, blocks, wants, draw(st.none() | U32))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    chosen = {row.request: row for row in draw(st.lists(rows(), max_size=4))}
    return Step(draw(st.integers(0, 2**63)), tuple(chosen.values()), draw(copies()))


@st.composite
def copies(draw: st.DrawFn) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(a, b) for a, b in draw(st.lists(st.tuples(U32, U32), max_size=3)))


def going_on(data: st.DataObject) -> Iterator[Step]:
    """Requests that decode step after step, or have chunks of their prompts computed, each with a list of its own.

    Its list grows between two steps, in place or as a copy, and may have pages to spare; some come, leave, are moved, or get other pages.
    """
    draw = data.draw
    live: dict[int, tuple[int, list[int]]] = {}  # request → (start, blocks)
    for step_id in range(draw(st.integers(1, 8))):
        for request in draw(st.lists(st.integers(0, 4), max_size=2)):  # comes, or begins again
            length = draw(st.integers(1, 80 * BLOCK))
            pages = length // BLOCK + 1 + draw(st.sampled_from((0, 0, 3)))
            live[request] = length, draw(st.lists(st.integers(0, 9), min_size=pages, max_size=pages))
        if draw(st.booleans()) and draw(st.booleans()) and live:
            live.pop(draw(st.sampled_from(sorted(live))))
        order = draw(st.permutations(sorted(live))) if draw(st.booleans()) else list(live)
        made = []
        for request in order:
            start, blocks = live[request]
            length = draw(st.sampled_from((1, 1, 1, 1, 1, 9)))
            while (start + length - 1) // BLOCK >= len(blocks):
                blocks.append(start)
            made.append(Row(request, (start,) * length, start, blocks, DRAW if length == 1 else None))
            live[request] = start + draw(st.sampled_from((length, length, length, 0))), blocks
        yield Step(step_id, tuple(made), draw(copies()))
        copied = draw(st.booleans())
        if copied:
            live = {request: (start, list(blocks)) for request, (start, blocks) in live.items()}


def assert_arrives(planned: Iterable[Step], prepares: bool) -> None:
    wire = StepWire(BLOCK, prepares=prepares)
    for step in planned:
        wire.assert_carries(step)


@given(st.lists(steps(), max_size=6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_sequence_of_steps_arrives_as_planned(planned: list[Step], prepares: bool) -> None:
    assert_arrives(planned, prepares)


@given(st.data(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_decodes_that_go_on_arrive_as_planned(data: st.DataObject, prepares: bool) -> None:
    assert_arrives(going_on(data), prepares)


def test_a_list_that_its_request_lengthens_is_no_trap() -> None:
    """The encoder must compare with what it sent, not with the request's own list, which has changed since."""
    encoder, decoder = StepEncoder(BLOCK), StepDecoder(BLOCK)
    blocks = [5]
    decoder.decode(encoder.encode(Step(1, (Row(1, [9], 3, blocks),))))
    blocks.append(6)
    blocks[0] = 7
    got = decoder.decode(encoder.encode(Step(2, (Row(1, [9], 4, blocks),))))
    assert got is not None and got.inputs is not None
    assert got.inputs.batch.tables.tolist() == [[7, 6]]


def test_a_list_that_changes_within_itself_is_what_the_harness_sees() -> None:
    """The control of what every step of the engine's tests is held against: a row's list only grows (replica.step.Row)."""
    wire, blocks = StepWire(BLOCK), [5, 6]
    wire.assert_carries(Step(1, (Row(1, [9], 4, blocks, DRAW),)))
    blocks[0] = 7
    with pytest.raises(AssertionError):
        wire.assert_carries(Step(2, (Row(1, [9], 5, blocks, DRAW),)))


@pytest.mark.parametrize("now", [[5], [5, 7, 8, 9]])
def test_a_decode_whose_list_lost_its_last_page_is_told_whole(now: list[int]) -> None:
    """Of a list that is still the same the last page that was told is looked at, not those before it."""
    encoder, decoder, blocks = StepEncoder(BLOCK), StepDecoder(BLOCK), [5, 6]
    decoder.decode(encoder.encode(Step(1, (Row(1, [9], 2 * BLOCK - 1, blocks, DRAW),))))
    blocks[:] = now
    start = len(now) * BLOCK - 1
    got = decoder.decode(encoder.encode(Step(2, (Row(1, [9], start, blocks, DRAW),))))
    assert got is not None and got.inputs is not None
    assert got.inputs.batch.tables.tolist() == [now]


def test_what_a_step_brought_stays_as_it_was_when_the_next_comes() -> None:
    encoder, decoder = StepEncoder(BLOCK), StepDecoder(BLOCK)
    blocks = [5]
    first = decoder.decode(encoder.encode(Step(1, (Row(1, [9], 3, blocks, DRAW),))))
    blocks += [6] * 80
    decoder.decode(encoder.encode(Step(2, (Row(1, [9], 320, blocks, DRAW),))))
    assert first is not None and first.inputs is not None
    assert first.inputs.batch.tables.tolist() == [[5]]


@pytest.mark.parametrize(("pages", "order", "bytes_max"), [(513, 1, 8), (600, 1, 8), (600, -1, 20)])
def test_a_decoding_request_costs_few_bytes_whatever_its_context(pages: int, order: int, bytes_max: int) -> None:
    """64 at most; less where rows stay in their order, whether or not its list has pages to spare. All take a page in this step."""
    encoder = StepEncoder(16)
    blocks = list(range(pages))
    encoder.encode(Step(1, tuple(Row(n, [5], 8191, blocks[:512], DRAW) for n in range(64))))
    data = encoder.encode(Step(2, tuple(Row(n, [5], 8192, blocks, DRAW) for n in range(64))[::order]))
    assert (len(data) - HEADER_BYTES) / 64 <= bytes_max


class Watched(list[int]):
    """A row's pages, and how many of them have been read at once."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        got = super().__getitem__(key)
        self.read += len(got) if isinstance(key, slice) else 1
        return got


def decodes_beside_a_chunk(step: int, decodes: Sequence[list[int]], prompt: list[int], order: int = 1) -> Step:
    """Contexts of 8,191 tokens and more, and chunks of 128 tokens: step 1 takes a page for each decode."""
    rows = [Row(n, [5], 8191 + step, pages, DRAW) for n, pages in enumerate(decodes)]
    return Step(step, (*rows[::order], Row(99, [5] * 128, 128 * step, prompt)))


@pytest.mark.parametrize(("order", "bytes_max"), [(1, 20), (-1, 28)])
def test_a_decoding_request_costs_few_bytes_beside_a_chunk_of_a_prompt(order: int, bytes_max: int) -> None:
    """16 and a page; 8 more where rows have changed places."""
    encoder, decodes, prompt = StepEncoder(16), [list(range(513)) for _ in range(64)], list(range(100))
    encoder.encode(decodes_beside_a_chunk(0, decodes, prompt))
    data = encoder.encode(decodes_beside_a_chunk(1, decodes, prompt, order))
    chunk = 4 * (6 + 128 + 8)
    assert (len(data) - HEADER_BYTES - chunk) / 64 <= bytes_max


@pytest.mark.parametrize("order", [1, -1])
def test_beside_a_chunk_of_a_prompt_pages_that_are_known_are_not_read_again(order: int) -> None:
    """Else every decode costs rank 0 its whole context in every step while any prompt is computed."""
    encoder, decodes, prompt = StepEncoder(16), [Watched(range(513)) for _ in range(4)], Watched(range(100))
    for step in range(2):
        encoder.encode(decodes_beside_a_chunk(step, decodes, prompt))
    for pages in (*decodes, prompt):
        pages.read = 0
    encoder.encode(decodes_beside_a_chunk(2, decodes, prompt, order))
    assert [pages.read <= 1 for pages in decodes] == [True] * 4 and prompt.read <= 9


def test_rows_with_pages_to_spare_that_change_places_or_begin_again_arrive() -> None:
    """Their lists are the same, and not read: what was told of them is in another place, or more than they need now."""
    wire, blocks = StepWire(BLOCK), [[1, 2, 3, 4], [5, 6, 7, 8]]
    for step_id, (order, start) in enumerate([((0, 1), 4), ((1, 0), 4), ((1, 0), 3), ((1, 0), 11), ((0, 1), 7)]):
        wire.assert_carries(Step(step_id, tuple(Row(n, [9], start, blocks[n], DRAW) for n in order)))


def test_a_long_row_that_has_gone_leaves_no_wide_table() -> None:
    """Else each later step whose rows change copies rows x the widest ever."""
    encoder, decoder = StepEncoder(BLOCK), StepDecoder(BLOCK)
    long, short = list(range(1000)), [1, 2]

    def width(*rows: Row) -> int:
        assert decoder.decode(encoder.encode(Step(1, rows))) is not None
        return decoder._tables._table.shape[1]

    assert width(Row(1, [9], 4, short, DRAW), Row(2, [9], 3999, long, DRAW)) == 1024
    assert width(Row(2, [9], 3999, long, DRAW), Row(3, [9], 4, short, DRAW)) == 1024, "while it is there"
    assert width(Row(3, [9], 4, short, DRAW)) == 64
    assert width(Row(2, [9], 3999, long, DRAW)) == 1024, "and again"


def test_stop_is_no_step() -> None:
    assert StepDecoder(BLOCK).decode(encode_stop()) is None


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_is_noticed(position: int, flip: int) -> None:
    data = bytearray(StepEncoder(BLOCK).encode(Step(1, (Row(1, [1, 2, 3], 0, [4]), Row(2, [7], 8, [1, 2, 3])), (BlockCopy(1, 2),))))
    index = position % len(data)
    data[index] ^= flip
    with pytest.raises(CodecError):
        StepDecoder(BLOCK).decode(bytes(data))


def prepared(start: int = BLOCK - 1) -> tuple[StepEncoder, StepDecoder, list[int]]:
    """Both ends after Step 1, of one row whose pages are the list, ready for a Step 2 that goes on."""
    encoder, decoder, blocks = StepEncoder(BLOCK), StepDecoder(BLOCK), list(range(4, 5 + start // BLOCK))
    decoder.decode(encoder.encode(Step(1, (Row(1, [9], start, blocks, DRAW),))))
    encoder.prepare()
    decoder.prepare()
    return encoder, decoder, blocks


def test_an_expected_step_is_the_one_that_was_prepared() -> None:
    """Else what was prepared would be of no use, and nobody would notice."""
    encoder, decoder, blocks = prepared()
    blocks.append(2**31 + 5)
    ahead = decoder._expected
    data = encoder.encode(Step(2, (Row(1, [2**32 - 1], BLOCK, blocks, DRAW),)))
    got = decoder.decode(data)
    assert encoder._came is not None and ahead is not None and got is ahead.step
    assert got.inputs is not None
    assert got.inputs.token_ids.tolist() == [2**32 - 1] and got.inputs.batch.tables.tolist() == [[4, 5 - 2**31]]


@pytest.mark.parametrize("position", range(HEADER_BYTES + 8))
def test_a_flipped_byte_of_an_expected_step_is_noticed(position: int) -> None:
    encoder, decoder, blocks = prepared()
    blocks.append(7)
    data = bytearray(encoder.encode(Step(2, (Row(1, [9], BLOCK, blocks, DRAW),))))
    assert len(data) == HEADER_BYTES + 8
    data[position] ^= 16
    with pytest.raises(CodecError):
        decoder.decode(bytes(data))


@pytest.mark.parametrize(
    "step",
    [
        Step(3, (Row(1, [9], BLOCK, [4, 5], DRAW),)),
        Step(2, (Row(1, [9], BLOCK, [4, 5], DRAW),), (BlockCopy(4, 6),)),
        Step(2, (Row(1, [9], BLOCK, [6, 5], DRAW),)),
        Step(2, (Row(1, [9], BLOCK - 1, [4, 5], DRAW),)),
        Step(2, (Row(1, [9], BLOCK, [4, 5]),)),
        Step(2, (Row(1, [9], BLOCK, [4, 5], DRAW, 0),)),
        Step(2, (Row(1, [9, 8], BLOCK, [4, 5], DRAW),)),
        Step(2, (Row(1, [9], BLOCK, [4, 5], DRAW), Row(2, [9], BLOCK, [4, 5], DRAW))),
        Step(2, ()),
    ],
)
@pytest.mark.parametrize("same_list", [False, True])
def test_what_is_not_quite_what_was_expected_arrives(step: Step, same_list: bool) -> None:
    wire, blocks = StepWire(BLOCK), [4]
    wire.assert_carries(Step(1, (Row(1, [9], BLOCK - 1, blocks, DRAW),)))
    if same_list and step.rows:
        first = step.rows[0]
        blocks[:] = first.blocks
        step = Step(step.step_id, (msgspec.structs.replace(first, blocks=blocks), *step.rows[1:]), step.copies)
    wire.assert_carries(step)
    wire.assert_carries(Step(4, (Row(1, [9], BLOCK + 1, blocks if same_list and len(blocks) > 1 else [4, 5], DRAW),)))


def test_a_row_that_goes_on_over_other_pages_arrives() -> None:
    """It lacks no page, so nothing but its list tells."""
    wire = StepWire(BLOCK)
    for step_id, pages in enumerate(([4], [7], [7])):
        wire.assert_carries(Step(step_id, (Row(1, [9], 1 + step_id, pages, DRAW),)))


@given(st.binary(max_size=200))
def test_garbage_is_noticed(data: bytes) -> None:
    with pytest.raises(CodecError):
        StepDecoder(BLOCK).decode(data)


@given(st.binary(max_size=400), st.integers(0, 8), st.integers(0, 6), st.lists(st.integers(0, 4), min_size=60, max_size=60))
@settings(max_examples=300, deadline=None)
def test_what_is_sealed_well_and_says_nonsense_is_noticed_or_a_step(tail: bytes, form: int, sizes: int, words: list[int]) -> None:
    """Whatever the columns say, a rank computes a step that is whole, or refuses: no other error, no page outside a row's own."""
    decoder = StepDecoder(BLOCK)
    decoder.decode(StepEncoder(BLOCK).encode(Step(1, (Row(1, [9] * 8, 0, [4, 5]), Row(2, [9], 0, [6])))))
    header = Header(form, 2, 1, sizes % 3, sizes, words[0], words[1] % 2, words[2] % 2)
    try:
        got = decoder.decode(seal(header, words[: header.words]))
    except CodecError:
        return
    if got is not None and got.inputs is not None:
        batch = got.inputs.batch
        assert int(batch.counts.sum()) == got.inputs.token_ids.size
        assert batch.tables.shape[1] * BLOCK >= int((batch.starts + batch.counts).max())


def test_a_rank_that_missed_a_step_refuses_the_next() -> None:
    encoder = StepEncoder(BLOCK)
    encoder.encode(Step(1, (Row(1, [1] * 8, 0, [4, 5]),)))
    with pytest.raises(CodecError, match="step 2 is number 1 of its sequence, 0 was expected"):
        StepDecoder(BLOCK).decode(encoder.encode(Step(2, (Row(1, [1], 8, [4, 5, 6]),))))


ONE_ROW = Header(DECODES, 7, 0, rows=1, tokens=1, pages=1, scored=0, copies=0)


@pytest.mark.parametrize(
    ("change", "words", "reason"),
    [
        ({}, [0, 0, 3, 9, 5], ""),
        ({}, [0, 2, 3, 9, 5], "row 0 keeps 2 pages of 0"),
        ({}, [0, 0, 4, 9, 5], "rows need 2 pages more, and 1 are there"),
        ({"pages": 0}, [0, 0, 3, 9], "rows need 1 pages more, and 0 are there"),
        ({"form": DECODES | SAME_ROWS}, [3, 9, 5], "1 rows are to go on, and the step before had 0"),
        ({"form": DECODES, "tokens": 2}, [0, 0, 3, 9, 9, 5], "1 rows decode, with 2 tokens, of which 0 are scored"),
        ({"form": 0}, [0, 0, 2, 1, 3, 9, 5], "its columns contradict each other"),
        ({"form": 0}, [0, 0, 1, 2, 3, 9, 5], "its columns contradict each other"),
        ({"form": 0}, [0, 0, 1, 4, 3, 9, 5], "its columns contradict each other"),
        ({"form": EXPECTED | DECODES}, [0, 0, 3, 9, 5], "form 12 is unknown"),
        ({"form": EXPECTED}, [9, 5], "it does not go on from the step before, with 1 rows and 1 tokens"),
    ],
)
def test_a_step_that_cannot_be_is_refused_with_the_reason(change: dict[str, int], words: list[int], reason: str) -> None:
    fields = {name: getattr(ONE_ROW, name) for name in ONE_ROW.__struct_fields__} | change
    data = seal(Header(**fields), words)
    if not reason:
        assert StepDecoder(BLOCK).decode(data) is not None
        return
    with pytest.raises(CodecError, match=f"^step 7: {reason}$"):
        StepDecoder(BLOCK).decode(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"rows": 2, "tokens": 2}, "it does not go on from the step before, with 2 rows and 2 tokens"),
        ({"tokens": 2}, "it does not go on from the step before, with 1 rows and 2 tokens"),
        ({"scored": 1}, "it does not go on from the step before, with 1 rows and 1 tokens"),
        ({"pages": 0}, "rows need 1 pages more, and 0 are there"),
        ({"pages": 2}, "rows need 1 pages more, and 2 are there"),
    ],
)
@pytest.mark.parametrize("prepared", [False, True])
def test_an_expected_step_that_does_not_go_on_is_refused(change: dict[str, int], reason: str, prepared: bool) -> None:
    decoder = StepDecoder(BLOCK)
    decoder.decode(StepEncoder(BLOCK).encode(Step(6, (Row(1, [9], BLOCK - 1, [4], DRAW),))))
    if prepared:
        decoder.prepare()
    fields = {name: getattr(ONE_ROW, name) for name in ONE_ROW.__struct_fields__} | {"form": EXPECTED, "number": 1} | change
    header = Header(**fields)
    data = seal(header, range(5, 5 + header.words))
    if not reason:
        got = decoder.decode(data)
        assert got is not None and got.inputs is not None
        assert got.inputs.batch.tables.tolist() == [[4, 6]]
        return
    with pytest.raises(CodecError, match=f"^step 7: {reason}$"):
        decoder.decode(data)


def test_another_version_is_refused() -> None:
    data = bytearray(encode_stop())
    data[2] += 1
    with pytest.raises(CodecError, match=r"not a Step of version 3: magic 0x524e, version 4"):
        StepDecoder(BLOCK).decode(bytes(data))


def test_a_step_cut_short_or_too_long_is_refused() -> None:
    data = StepEncoder(BLOCK).encode(Step(7, (Row(1, [1], 0, [4], DRAW),)))
    for body in (data[HEADER_BYTES:-4], data[HEADER_BYTES:] + bytes(4)):
        head = data[: HEADER_BYTES - 4]
        wrong = head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little") + body
        with pytest.raises(CodecError, match=f"step 7 has {len(wrong)} bytes, {len(data)} were expected"):
            StepDecoder(BLOCK).decode(wrong)


def test_too_few_pages_are_refused_by_the_sender() -> None:
    with pytest.raises(ValueError, match="needs 2 pages and has 1"):
        StepEncoder(BLOCK).encode(Step(1, (Row(1, [1] * 5, 0, [4]),)))
    encoder, _, blocks = prepared()
    with pytest.raises(ValueError, match="needs 2 pages and has 1"):
        encoder.encode(Step(2, (Row(1, [1], BLOCK, blocks, DRAW),)))


def test_a_token_that_no_u32_holds_is_refused_by_the_sender() -> None:
    encoder, _, blocks = prepared(1)
    with pytest.raises(OverflowError):
        encoder.encode(Step(2, (Row(1, [-1], 2, blocks, DRAW),)))
