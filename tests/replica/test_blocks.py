"""One function names a KV block for router and replica: equal content, equal key, and never otherwise."""

from __future__ import annotations

import sys
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from replica.contract.blocks import KEY_BYTES, block_key, block_keys, root_key

ROOT_KEY = root_key(model="m", revision="r")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(tokens, st.integers(1, 20))
def test_keys_are_the_chain_of_single_blocks(ids: list[int], block_size: int) -> None:
    keys = block_keys(ROOT_KEY, ids, block_size)
    assert len(keys) == len(ids) // block_size
    parent = ROOT_KEY
    for index, key in enumerate(keys):
        parent = block_key(parent, ids[index * block_size : (index + 1) * block_size])
        assert key == parent and len(key) == KEY_BYTES


@given(tokens, tokens, st.integers(1, 8))
def test_keys_agree_exactly_on_the_common_prefix(left: list[int], right: list[int], block_size: int) -> None:
    for index, (a, b) in enumerate(zip(block_keys(ROOT_KEY, left, block_size), block_keys(ROOT_KEY, right, block_size), strict=False)):
        end = (index + 1) * block_size
        assert (a == b) == (left[:end] == right[:end])


def test_everything_content_depends_on_is_in_the_root() -> None:
    roots = {
        root_key(model="m", revision="r"),
        root_key(model="m", revision="s"),
        root_key(model="mr", revision=""),
        root_key(model="m", revision="r", adapter="a"),
        root_key(model="m", revision="r", cache_salt=b"a"),
    }
    assert len(roots) == 5


def test_tokens_are_little_endian_on_every_machine() -> None:
    expected = blake2b(ROOT_KEY + b"\x01\0\0\0\x02\x01\0\0", digest_size=KEY_BYTES).digest()
    assert block_key(ROOT_KEY, [1, 258]) == expected, sys.byteorder
