"""Bearer tokens: who asks, and that they may."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from router.api.errors import ApiError
from router.api.submission import Caller

_TENANT_BYTES = 8
NOBODY = Caller()


class Authenticator:
    """Knows the accepted keys by their digests. Without keys everyone is let in as the same caller."""

    __slots__ = ("_callers",)

    def __init__(self, api_keys: Sequence[str], tenants: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        """`api_keys`: each a tenant of its own. `tenants`: keys by name; those of one tenant share cached blocks."""
        single = [(_digest(key.encode()), _caller(key)) for key in api_keys]
        named = [(_digest(key.encode()), Caller(name, _salt_key(keys[0]))) for name, keys in tenants.items() for key in keys]
        self._callers = (*single, *named)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Raises ApiError 401. Every key is compared, each in constant time."""
        if not self._callers:
            return NOBODY
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode())
        found: Caller | None = None
        for accepted, caller in self._callers:
            if hmac.compare_digest(accepted, digest):
                found = caller
        if found is None or scheme.lower() != "bearer":
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _caller(key: str) -> Caller:
    tenant = hashlib.blake2b(key.encode(), digest_size=_TENANT_BYTES, person=b"rantang-tenant").hexdigest()
    return Caller(tenant, _salt_key(key))


def _salt_key(key: str) -> bytes:
    return hmac.new(key.encode(), b"cache-salt", hashlib.sha256).digest()
