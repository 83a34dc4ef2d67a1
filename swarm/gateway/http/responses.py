"""Responses in JSON, and errors as responses."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.http.disconnect import ClientDisconnected
from swarm.gateway.openai.api_errors import ApiError, InternalServerError, api_error

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status in the log for a client that disconnected; nginx introduced it."""

Endpoint = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """A response in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: ApiError) -> JsonResponse:
    """The response that reports an error."""
    return JsonResponse(error.body(), status_code=error.status, headers=dict(error.headers))


def with_error_responses(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with its exceptions turned into responses in OpenAI's form."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:  # a bug, too, has to be answered in OpenAI's form
            reported = api_error(error)
            if isinstance(reported, InternalServerError):
                logger.exception("%s %s failed", request.method, request.scope["path"])
            return error_response(reported)

    return call
