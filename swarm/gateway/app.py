"""The gateway's ASGI application: its routes, its middleware, and what it tells of models and health."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from swarm.gateway.access import HostCheck, authenticate, cors_middleware
from swarm.gateway.dialects.anthropic_messages import AnthropicDialect
from swarm.gateway.dialects.ollama import (
    INTERFACE_VERSION,
    OllamaDialect,
    listed_model,
    running_model,
)
from swarm.gateway.dialects.openai_responses import ResponsesDialect
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.generation_endpoints import GenerationEndpoints
from swarm.gateway.http.middleware import AccessLog, RequestDraining
from swarm.gateway.http.responses import JsonResponse, error_response, with_error_responses
from swarm.gateway.openai.api_errors import ApiError, MethodNotAllowed, NotFound
from swarm.gateway.openai.response_writers import model_object
from swarm.gateway.request_readers import RequestReaders
from swarm.gateway.tokenizer_endpoints import TokenizerEndpoints
from swarm.metrics.registry import encode_metrics
from swarm.web.http_server import PageFiles

ADDRESSES = (
    *("models", "chat/completions", "completions", "embeddings", "responses", "messages", "messages/count_tokens"),
    *("tokenize", "detokenize", "tokenizer_info"),
)
"""Below `/v1/`."""


class InfoEndpoints:
    """Answers requests that do not generate text."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway

    async def addresses(self, request: Request) -> Response:
        """`GET /v1/`: a list of addresses, for people who open the `base_url` in a browser."""
        return JsonResponse({"object": "list", "data": [f"/v1/{name}" for name in ADDRESSES]})

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        await authenticate(self._gateway, request.headers)
        models = [model_object(model) for model in self._gateway.models.values()]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}  # as Anthropic has them
        return JsonResponse({"object": "list", "data": models, **ends})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        await authenticate(self._gateway, request.headers)
        return JsonResponse(model_object(self._gateway.model(request.path_params["name"])))

    async def ollama_models(self, request: Request) -> Response:
        """`GET /api/tags`, which is Ollama's, as are those that follow."""
        await authenticate(self._gateway, request.headers)
        return JsonResponse({"models": [listed_model(model) for model in self._gateway.models.values()]})

    async def ollama_running(self, request: Request) -> Response:
        """`GET /api/ps`: all models are loaded."""
        await authenticate(self._gateway, request.headers)
        return JsonResponse({"models": [running_model(model) for model in self._gateway.models.values()]})

    async def ollama_version(self, request: Request) -> Response:
        """`GET /api/version`."""
        return JsonResponse({"version": INTERFACE_VERSION})

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


PAGE_FOLDER = Path(__file__).with_name("page")
PAGE_HEADERS = {"Cache-Control": "no-cache"}


def make_app(gateway: GatewayState, more_routes: Sequence[BaseRoute] = (), check_host: bool = False) -> Starlette:
    """The ASGI application.

    Args:
        more_routes: such as the monitor's.
        check_host: whether to accept only this machine's own names, and `GatewaySettings.host_names`.
    """
    info, generation, tokenizers = InfoEndpoints(gateway), GenerationEndpoints(gateway), TokenizerEndpoints(gateway)
    count_tokens = tokenizers.answering(tokenizers.count_tokens, AnthropicDialect)
    routes: list[BaseRoute] = [
        *(Route(path, with_error_responses(info.addresses)) for path in ("/v1", "/v1/")),
        *(Route(path, with_error_responses(info.models)) for path in ("/v1/models", "/v1/models/")),
        Route("/v1/models/{name:path}", with_error_responses(info.model)),
        *_generation_routes(generation, RequestReaders(gateway)),
        Route("/v1/responses/{id}", with_error_responses(generation.response), methods=["GET", "DELETE"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        *_tokenizer_routes(tokenizers),
        *_ollama_routes(info, tokenizers),
        Route("/healthz", with_error_responses(info.health)),
        Route("/readyz", with_error_responses(info.readiness)),
        Route("/metrics", with_error_responses(info.metrics)),
        *more_routes,
        Route("/", _chat_page),
        Mount("/page", PageFiles(PAGE_FOLDER, PAGE_HEADERS)),
    ]
    middleware = [
        Middleware(RequestDraining),
        Middleware(AccessLog, metrics=gateway.metrics),
    ]
    origins = gateway.settings.cors_origins
    if check_host:
        middleware.append(Middleware(HostCheck, host_names=gateway.settings.host_names))
    if origins:
        middleware.append(cors_middleware(origins))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _routing_error},
    )


def _tokenizer_routes(endpoints: TokenizerEndpoints) -> list[BaseRoute]:
    """At the root, as vLLM has them, and beside the other addresses."""
    tokenize, detokenize = endpoints.answering(endpoints.tokenize), endpoints.answering(endpoints.detokenize)
    return [
        route
        for prefix in ("", "/v1")
        for route in (
            Route(f"{prefix}/tokenize", tokenize, methods=["POST"]),
            Route(f"{prefix}/detokenize", detokenize, methods=["POST"]),
            Route(f"{prefix}/tokenizer_info", with_error_responses(endpoints.info)),
        )
    ]


def _generation_routes(generation: GenerationEndpoints, readers: RequestReaders) -> list[BaseRoute]:
    answered = {
        "/v1/chat/completions": generation.answering(readers.chat),
        "/v1/completions": generation.answering(readers.completion),
        "/v1/embeddings": generation.answering(readers.embeddings),
        "/v1/responses": generation.answering(readers.responses, ResponsesDialect),
        "/v1/messages": generation.answering(readers.messages, AnthropicDialect),
        "/api/chat": generation.answering(readers.ollama_chat, OllamaDialect),
        "/api/generate": generation.answering(readers.ollama_generate, OllamaDialect),
    }
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in answered.items()]


def _ollama_routes(info: InfoEndpoints, tokenizers: TokenizerEndpoints) -> list[BaseRoute]:
    told = {"tags": info.ollama_models, "ps": info.ollama_running, "version": info.ollama_version}
    return [
        *(Route(f"/api/{name}", with_error_responses(call, OllamaDialect)) for name, call in told.items()),
        Route("/api/show", tokenizers.answering(tokenizers.ollama_model, OllamaDialect), methods=["POST"]),
    ]


async def _chat_page(request: Request) -> Response:
    return FileResponse(PAGE_FOLDER / "index.html", headers=PAGE_HEADERS)


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's 404 and 405 in OpenAI's form."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:100]  # not `request.url`, which is made of the Host header too
    reported: ApiError
    if error.status_code == 405:
        reported = MethodNotAllowed(f"{path} does not support {request.method}", code="method_not_allowed")
    else:
        reported = NotFound(f"there is nothing at {path}", code="not_found")
    response = error_response(reported)
    response.headers.update(error.headers or {})
    return response
