"""Callbacks that do not keep the object alive that they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


_RAISE: Any = object()


def weak_callback(method: Callable[P, T], gone: T = _RAISE) -> Callable[P, T]:
    """A function that calls a bound method for as long as something else keeps the method's object.

    Given to a part of that object, the method itself would make a cycle. Python frees cycles only when its collector
    runs, and that seldom looks at a process's older objects, however much memory they hold.

    Args:
        gone: returned when the object is gone; without it, `ReferenceError` is raised then.
    """
    bound: Any = method
    reference, function = weakref.ref(bound.__self__), bound.__func__

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        living = reference()
        if living is not None:
            return function(living, *args, **kwargs)  # type: ignore[no-any-return]
        if gone is _RAISE:
            raise ReferenceError("the object that should be called is gone")
        return gone

    return call
