"""Warnings that have the same reason again and again, written to the log once."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

MAX_REMEMBERED = 256
"""Messages that are not repeated. What was not said for so many others may be said again."""


class WarnOnce:
    """Writes each message to a log once, as long as it is among the last ones. May be called by any thread.

    Args:
        logger: whose log it is.
        prefix: in front of each message, such as the name of a model.
    """

    def __init__(self, logger: logging.Logger, prefix: str = "") -> None:
        self._logger, self._prefix = logger, prefix
        self._said: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, message: str, error: BaseException | None = None) -> None:
        """Write a warning, with the traceback of an error, unless the message is in the log already."""
        with self._lock:
            is_new = message not in self._said
            self._said[message] = None
            self._said.move_to_end(message)
            if len(self._said) > MAX_REMEMBERED:
                self._said.popitem(last=False)
        if is_new:
            self._logger.warning("%s%s", self._prefix, message, exc_info=error)
