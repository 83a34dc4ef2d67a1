"""What can be wrong with a request, or with the swarm while it is answered, in the shape in which OpenAI tells it.

The class says who has to act: 4xx whoever sent the request, 5xx whoever runs the gateway or its swarm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from swarm.errors import (
    CacheFull,
    ChatTemplateError,
    MissingBlocks,
    NotEnoughMemory,
    RemoteError,
    SwarmError,
    TooLong,
)

RETRY_SWARM = 10
"""Seconds after which it is worth trying again where servers are missing or full."""


class ApiFailure(SwarmError):
    """A request that is not answered as it was meant to be.

    Attributes:
        status: of HTTP.
        kind, code, param: `type`, `code` and `param` of OpenAI's error object.
        retry_after: seconds, if it is worth trying again.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


class BadRequest(ApiFailure):
    """The request is wrong, and would be wrong tomorrow."""

    status = 400
    kind = "invalid_request_error"


class WrongKey(ApiFailure):
    """No key, or one that this gateway does not know."""

    status = 401
    kind = "invalid_request_error"


class WrongOrigin(ApiFailure):
    """A page from elsewhere asks, through the browser of somebody who may."""

    status = 403
    kind = "invalid_request_error"


class WrongHost(ApiFailure):
    """Asked for by a name that may be anybody's."""

    status = 403
    kind = "invalid_request_error"


class NotFound(ApiFailure):
    """No such model, or no such address."""

    status = 404
    kind = "invalid_request_error"


class WrongMethod(ApiFailure):
    """The address does not take this method."""

    status = 405
    kind = "invalid_request_error"


class TooSlow(ApiFailure):
    """The request did not arrive in time."""

    status = 408
    kind = "invalid_request_error"

    @property
    def headers(self) -> Mapping[str, str]:
        """The rest of the request is not waited for."""
        return {**super().headers, "Connection": "close"}


class TooLarge(ApiFailure):
    """The request is larger than what this gateway reads."""

    status = 413
    kind = "invalid_request_error"


class TooMany(ApiFailure):
    """A limit is used up, or everybody is busy."""

    status = 429
    kind = "rate_limit_error"


class Broken(ApiFailure):
    """The gateway made a mistake."""


class Unavailable(ApiFailure):
    """The swarm cannot compute this at present."""

    status = 503


def failure_of(error: BaseException) -> ApiFailure:
    """What a person is told about an error that came up while a request was answered."""
    if isinstance(error, ApiFailure):
        return error
    if isinstance(error, MissingBlocks):
        return Unavailable(str(error), code="blocks_missing", retry_after=RETRY_SWARM)
    if isinstance(error, CacheFull | NotEnoughMemory):
        return Unavailable(f"{error}; try again, or ask for fewer tokens", code="swarm_full", retry_after=RETRY_SWARM)
    if isinstance(error, TooLong):
        return BadRequest(str(error), param="max_tokens", code="context_length_exceeded")
    if isinstance(error, ChatTemplateError):
        return BadRequest(str(error), param="messages", code="template_refused")
    if isinstance(error, RemoteError):
        return Unavailable(f"the swarm failed: {error}", code=error.code, retry_after=RETRY_SWARM)
    # What went wrong inside is for the log, not for the network.
    return Broken("the gateway failed; its log says why", code="internal_error")
