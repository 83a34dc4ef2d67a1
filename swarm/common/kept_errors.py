"""Errors that are kept after they were handled."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """The error itself, without its traceback and context.

    These keep all variables of the functions that it passed through: also the one that keeps the error, which makes a
    cycle (see `weak_callback`). For an error that is not raised again, or only as a new one.
    """
    error.__traceback__ = error.__context__ = None
    return error
