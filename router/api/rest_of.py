"""A coroutine that was begun by hand, and waits: most have nothing to wait for, and what their waiting needs (a timer) is spared."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class RestOf(Generic[Result]):
    """To be awaited once: by the task that made the first step, or by any if that step left nothing with its task.

    `waits_for` is what that step, `coroutine.send(None)`, returned.
    """

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, Result] | Generator[Any, Any, Result], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Result]:
        """What the coroutine waits for goes to the task; what the task throws in (a cancellation) goes to the coroutine."""
        step: Callable[[Any], Any]
        while True:
            try:
                value, step = (yield self._waits_for), self._coroutine.send
            except BaseException as error:
                value, step = error, self._coroutine.throw
            try:
                self._waits_for = step(value)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
