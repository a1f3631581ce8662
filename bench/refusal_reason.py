"""What a server said when it refused, in one short line."""

from __future__ import annotations

import msgspec

CHARACTERS_MAX = 160


def reason_of(body: bytes) -> str:
    """The message of an error body in OpenAI's shape or a similar one; of any other body its beginning. Empty: it was."""
    try:
        found = _message(msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = None
    line = " ".join((found or body.decode(errors="replace")).split())
    plain = "".join(character for character in line if character.isprintable())
    return plain if len(plain) <= CHARACTERS_MAX else plain[: CHARACTERS_MAX - 1] + "…"


def _message(found: object) -> str | None:
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), None)
    return found if isinstance(found, str) else None
