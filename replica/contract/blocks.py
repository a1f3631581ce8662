"""The identity of a KV block: one function, used by the router and the replica alike.

key(block) = blake2b-128(parent key ‖ tokens as little-endian u32). The parent of a first block is the *root key*, which
hashes everything beside the tokens that the block's content depends on: model, revision, adapter and cache salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import iter_unpack

KEY_BYTES = 16


def root_key(*, model: str, revision: str, adapter: str = "", cache_salt: bytes = b"") -> bytes:
    """Parent of every first block of this (model, revision, adapter, salt): 16 bytes."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"rantang-root")
    for part in (model.encode(), revision.encode(), adapter.encode(), cache_salt):
        digest.update(len(part).to_bytes(4, "little"))  # length first: ("ab","c") is not ("a","bc")
        digest.update(part)
    return digest.digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of one full block whose predecessor has the key `parent`. Token ids must fit in 32 bits."""
    return blake2b(parent + _little_endian(tokens), digest_size=KEY_BYTES).digest()


def block_keys(root: bytes, tokens: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Keys of the full blocks of `tokens`, first to last; a partial last block has none."""
    data = _little_endian(tokens)
    width = 4 * block_size
    fresh = _EMPTY.copy
    keys: list[bytes] = []
    parent = root
    for (block,) in iter_unpack(f"{width}s", data[: len(data) // width * width]):
        digest = fresh()
        digest.update(parent)
        digest.update(block)
        parent = digest.digest()
        keys.append(parent)
    return tuple(keys)


def _little_endian(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)
    if packed.itemsize != 4:
        raise RuntimeError("this platform's unsigned int is not 32 bits wide")
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


_EMPTY = blake2b(digest_size=KEY_BYTES)  # copied for each block: to take its parameters in again would cost half as much as the hash
_BIG_ENDIAN = array("H", [1]).tobytes() == b"\x00\x01"
