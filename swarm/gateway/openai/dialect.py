"""How streams and errors are written: in OpenAI's form, from which those of other interfaces derive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from swarm.gateway.openai.api_errors import ApiError


@dataclass(frozen=True)
class StreamEvent:
    """One piece of a streamed response: an object, and the event's name if it has one."""

    body: Mapping[str, Any]
    name: str | None = None


class Dialect:
    """How an interface writes streams and errors; this one is that of OpenAI's completions.

    There is one for each response, because a stream may count its events.

    Attributes:
        media_type: of a stream.
        keep_alive: what clients ignore, sent while there is nothing to say.
        end: what follows the last event of a stream that has not failed.
    """

    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    keep_alive: ClassVar[bytes] = b": waiting\n\n"
    end: ClassVar[bytes] = b"data: [DONE]\n\n"

    @staticmethod
    def error_body(error: ApiError) -> dict[str, Any]:
        """The body of a response that reports an error."""
        return error.body()

    def event(self, event: StreamEvent) -> bytes:
        """An event of the stream."""
        head = b"" if event.name is None else b"event: " + event.name.encode() + b"\n"
        return head + b"data: " + msgspec.json.encode(event.body) + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        """The last event of a stream that has failed."""
        return self.event(StreamEvent(self.error_body(error)))
