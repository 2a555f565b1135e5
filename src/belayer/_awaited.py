"""A call that nobody awaits never runs, and a rollout would go on, and be scored, as if it had. Here it is noticed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from belayer.errors import RequestRefused

Given = ParamSpec("Given")
Answer = TypeVar("Answer")
Self = TypeVar("Self")


class LastCall:
    """The newest call of a rollout. Every call looks whether the one before has begun, and so does the end."""

    def __init__(self, rollout_id: str) -> None:
        self._id = rollout_id
        self._name = ""
        self._coroutine: Coroutine[Any, Any, Any] | None = None

    def made(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._name, self._coroutine = name, coroutine

    def check(self, before: str) -> None:
        """Raises `RequestRefused` if the newest call has not begun, which without `await` it never does."""
        last, self._coroutine = self._coroutine, None
        if last is not None and inspect.getcoroutinestate(last) == inspect.CORO_CREATED:
            last.close()
            raise RequestRefused(
                f"rollout {self._id}: {self._name} was called but not awaited before {before}, so it never ran",
                next_step=f"write `await rollout.{self._name}(...)`, one call after another: replay needs their order",
            )


def noticed(
    prefix: str = "",
) -> Callable[
    [Callable[Concatenate[Self, Given], Coroutine[Any, Any, Answer]]],
    Callable[Concatenate[Self, Given], Coroutine[Any, Any, Answer]],
]:
    """For async methods of a rollout, or of what has one in `_rollout`; `prefix`: what users write before."""

    def decorate(
        method: Callable[Concatenate[Self, Given], Coroutine[Any, Any, Answer]],
    ) -> Callable[Concatenate[Self, Given], Coroutine[Any, Any, Answer]]:
        name = prefix + method.__name__

        @functools.wraps(method)
        def call(self: Self, *args: Given.args, **kwargs: Given.kwargs) -> Coroutine[Any, Any, Answer]:
            rollout: Any = getattr(self, "_rollout", self)
            last: LastCall = rollout.last_call
            last.check(name)
            coroutine = method(self, *args, **kwargs)
            last.made(name, coroutine)
            return coroutine

        return call

    return decorate
