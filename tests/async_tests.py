"""Tests that are written as coroutines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Decorator = Callable[[Callable[..., Any]], Any]


def as_test(run: Callable[..., None], *provided: str, fixtures: tuple[str, ...] = ()) -> Callable[..., Decorator]:
    """A decorator with arguments that makes a test of a coroutine function.

    Args:
        run: is called with the fixtures, the test and the decorator's arguments.
        provided: parameters of the test that `run` gives it; all others are fixtures.
        fixtures: what `run` needs itself.
    """

    def with_arguments(*arguments: Any, **options: Any) -> Decorator:
        def decorate(test: Callable[..., Any]) -> Any:
            own = [one for name, one in inspect.signature(test).parameters.items() if name not in provided]
            names = [one.name for one in own]

            @functools.wraps(test)
            def whole(*positional: Any, **values: Any) -> None:  # hypothesis passes what it draws by position
                values.update(zip(names, positional, strict=False))
                given = {name: values[name] for name in names}
                run(*(values[name] for name in fixtures), functools.partial(test, **given), *arguments, **options)

            others = [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in fixtures
                if name not in names
            ]
            vars(whole)["__signature__"] = inspect.Signature([*others, *own])
            return whole

        return decorate

    return with_arguments
