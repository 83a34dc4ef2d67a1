"""Work that one thread does for others: whatever it raises belongs to the one that asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def result_or_error(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | BaseException:
    """The result of `work`, or the exception that it raised, of whatever kind.

    Work for others may raise anything. The thread that does it has to go on, and each requester gets its own error.
    """
    try:
        return work(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001  (see above)
        return error
