"""The endpoints that report the gateway's models, health and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.access.authentication import authenticate
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.responses import JsonResponse
from swarm.gateway.openai.response_writers import model_object
from swarm.metrics.registry import encode_metrics

ADDRESSES = ("models", "chat/completions", "completions", "tokenize", "detokenize", "tokenizer_info")
"""Below `/v1/`."""


class InfoEndpoints:
    """Answers requests that do not generate text.

    Args:
        gateway: the state that all requests share.
    """

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway

    async def addresses(self, request: Request) -> Response:
        """`GET /v1/`: what people see who open the `base_url` in a browser."""
        return JsonResponse({"object": "list", "data": [f"/v1/{name}" for name in ADDRESSES]})

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        await authenticate(self._gateway, request.headers)
        models = [model_object(model) for model in self._gateway.models.values()]
        return JsonResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        await authenticate(self._gateway, request.headers)
        return JsonResponse(model_object(self._gateway.model(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """`GET /healthz`: the process works."""
        return JsonResponse({"status": "ok"})

    async def readiness(self, request: Request) -> Response:
        """`GET /readyz`: servers hold all blocks, so requests can be answered."""
        await self._gateway.check_ready()
        return JsonResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        if not self._gateway.settings.public_status:
            await authenticate(self._gateway, request.headers)
        body, media_type = encode_metrics(self._gateway.registry)
        return Response(body, media_type=media_type)
