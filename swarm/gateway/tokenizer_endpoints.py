"""The endpoints about tokenizers: tokens of a text, the text of tokens, and what a tokenizer is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.access.authentication import authenticate
from swarm.gateway.access.cors import check_origin
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.request_body import TOKEN_BYTES, read_body
from swarm.gateway.http.responses import JsonResponse
from swarm.gateway.openai.tokenizer_requests import (
    detokenize_reply,
    parse_detokenize_request,
    parse_tokenize_request,
    tokenize_reply,
    tokenizer_info,
)
from swarm.generation.served_model import ServedModel


class TokenizerEndpoints:
    """Answers requests about the models' tokenizers. A request that names no model is about the first one.

    Args:
        gateway: the state that all requests share.
    """

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        return await self._answer(request, self._detokenize)

    async def info(self, request: Request) -> Response:
        """`GET /tokenizer_info`, with the model's name as `?model=` if there are several."""
        await authenticate(self._gateway, request.headers)
        return JsonResponse(tokenizer_info(self._model(request.query_params.get("model", ""))))

    async def _answer(self, request: Request, answer: Callable[[bytes], dict[str, Any]]) -> Response:
        key = await authenticate(self._gateway, request.headers)
        settings = self._gateway.settings
        with self._gateway.request_room(key) as room:
            check_origin(request.headers, settings.cors_origins, settings.host_names)
            body = await read_body(request, settings.max_request_bytes, settings.read_timeout_s, room)
            self._gateway.metrics.body_received(len(body))
            reply = await self._gateway.run_in_thread(request.receive, key, partial(answer, body))
            room.hold(len(reply.get("tokens", ())) * TOKEN_BYTES)
            return JsonResponse(reply)

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        asked = parse_tokenize_request(body)
        return tokenize_reply(asked, self._model(asked.model))

    def _detokenize(self, body: bytes) -> dict[str, Any]:
        asked = parse_detokenize_request(body)
        return detokenize_reply(asked, self._model(asked.model))

    def _model(self, name: str) -> ServedModel:
        return self._gateway.model(name) if name else next(iter(self._gateway.models.values()))
