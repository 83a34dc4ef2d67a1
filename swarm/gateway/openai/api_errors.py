"""Errors that end a request, in OpenAI's form, and the table that maps the project's errors to them.

The status says who has to act: 4xx the client that sent the request, 5xx the operator of the gateway or of its swarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from swarm.errors import (
    CacheFull,
    ChatTemplateError,
    HubUnreachable,
    ImageRefused,
    MissingBlocks,
    RemoteError,
    SwarmError,
    TooLong,
)
from swarm.generation.errors import InvalidGenerationRequest

SWARM_RETRY_AFTER_S = 10
"""When to try again if servers are missing or full."""


class ApiError(SwarmError):
    """A request cannot be answered.

    Attributes:
        status: of HTTP.
        error_type, code, param: `type`, `code` and `param` of OpenAI's error object.
        retry_after_s: when to try again; None if that would not help.
    """

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.error_type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class BadRequest(ApiError):
    """The request is invalid."""

    status = 400
    error_type = "invalid_request_error"


class InvalidApiKey(ApiError):
    """The API key is missing or unknown."""

    status = 401
    error_type = "invalid_request_error"


class OriginNotAllowed(ApiError):
    """A web page from another site sent the request."""

    status = 403
    error_type = "invalid_request_error"


class HostNotAllowed(ApiError):
    """The Host header holds a name that may belong to anyone."""

    status = 403
    error_type = "invalid_request_error"


class NotFound(ApiError):
    """The model or the path does not exist."""

    status = 404
    error_type = "invalid_request_error"


class MethodNotAllowed(ApiError):
    """The path does not support this HTTP method."""

    status = 405
    error_type = "invalid_request_error"


class RequestTimeout(ApiError):
    """The request did not arrive in time."""

    status = 408
    error_type = "invalid_request_error"

    @property
    def headers(self) -> Mapping[str, str]:
        """The connection is closed, because the rest of the request is not read."""
        return {**super().headers, "Connection": "close"}


class PayloadTooLarge(ApiError):
    """The request is larger than the gateway allows."""

    status = 413
    error_type = "invalid_request_error"


class UnsupportedMediaType(ApiError):
    """The request's body is packed in a way that is not known here."""

    status = 415
    error_type = "invalid_request_error"


class TooManyRequests(ApiError):
    """A limit of the key is used up, or the gateway is busy."""

    status = 429
    error_type = "rate_limit_error"


class InternalServerError(ApiError):
    """The gateway failed because of a bug."""


class ServiceUnavailable(ApiError):
    """The swarm cannot compute the answer at present."""

    status = 503


def _unavailable(code: str | None, message: Callable[[BaseException], str] = str) -> Callable[[Any], ApiError]:
    return lambda error: ServiceUnavailable(message(error), code=code or error.code, retry_after_s=SWARM_RETRY_AFTER_S)


SWARM_FULL = "the swarm's servers had no room for this text within a minute; try again later, or send a shorter prompt"
TOO_LONG = "the text is longer than the servers of this swarm take; send a shorter prompt, or ask for fewer tokens"
"""For clients, who do not know of caches and sessions. The log has what servers said."""


_API_ERRORS: Mapping[type[SwarmError], Callable[[Any], ApiError]] = {
    # The first entry that fits counts: subclasses come before their base class.
    ApiError: lambda error: error,
    InvalidGenerationRequest: lambda error: BadRequest(str(error), param=error.parameter, code=error.code),
    ImageRefused: lambda error: BadRequest(str(error), param="messages", code="invalid_image"),
    ChatTemplateError: lambda error: BadRequest(str(error), param="messages", code="template_refused"),
    TooLong: lambda error: BadRequest(TOO_LONG, param="max_tokens", code="context_length_exceeded"),
    MissingBlocks: _unavailable("blocks_missing"),
    CacheFull: _unavailable("swarm_full", lambda error: SWARM_FULL),
    HubUnreachable: _unavailable("hub_unreachable"),
    RemoteError: _unavailable(None, lambda error: f"the swarm failed: {error}"),
}
"""How the gateway reports each kind of error. Anything else is a bug of the gateway."""


def api_error(error: BaseException) -> ApiError:
    """The error as clients are told of it."""
    for kind, convert in _API_ERRORS.items():
        if isinstance(error, kind):
            return convert(error)
    # Details of a bug are for the log, not for the network.
    return InternalServerError("the gateway failed; its log has the details", code="internal_error")
