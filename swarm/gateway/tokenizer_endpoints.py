"""The endpoints about tokenizers, as vLLM has them: tokens of a text or a conversation, and the text of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.access import authenticate, check_origin
from swarm.gateway.dialects.anthropic_messages import CountRequest, read_messages_request
from swarm.gateway.dialects.ollama import ShowRequest, shown_model
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.request_body import TOKEN_BYTES, read_body
from swarm.gateway.http.responses import Endpoint, JsonResponse, cancel_on_disconnect, with_error_responses
from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.dialect import Dialect
from swarm.gateway.openai.refused_fields import CHAT
from swarm.gateway.openai.request_conversion import template_message, template_options, tool_options
from swarm.gateway.openai.request_schema import (
    ChatRequest,
    PromptRequest,
    TokenId,
    check_chat_request,
    decode_request,
)
from swarm.generation.prompts import conversation_prompt
from swarm.generation.served_model import ServedModel


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /tokenize`, if it has a `prompt`."""

    prompt: str
    model: str = ""
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class _TokenizeHead(Struct):
    """What says of which kind a request is."""

    prompt: Any = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str = ""


def parse_tokenize_request(body: bytes) -> TokenizeRequest | PromptRequest:
    """A text, or a conversation with the fields of a chat request that change its prompt.

    Raises:
        BadRequest: the body is neither.
    """
    if decode_request(_TokenizeHead, body).prompt is not None:
        return decode_request(TokenizeRequest, body)
    request = decode_request(PromptRequest, body, CHAT)
    check_chat_request(request)
    return request


def chat_prompt(request: ChatRequest, served: ServedModel) -> list[int]:
    """The tokens of a conversation.

    Raises:
        ChatTemplateError, InvalidGenerationRequest, BadRequest: as for a chat request.
    """
    messages = [template_message(message) for message in request.messages]
    return conversation_prompt(served, messages, tool_options(request), template_options(request, served))[0]


def tokenizer_info(served: ServedModel) -> dict[str, Any]:
    """What programs that prepare prompts themselves need to know."""
    special = {name: getattr(served.tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "model": served.name,
        "tokenizer_class": type(served.tokenizer).__name__,
        "vocab_size": served.vocabulary_size,
        "model_max_length": served.context_length,
        "chat_template": served.chat_template,
        **{name: None if token is None else str(token) for name, token in special.items()},
    }


class TokenizerEndpoints:
    """Answers requests about the models and their tokenizers. A request that names no model is about the first one."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway

    def answering(self, answer: Callable[[bytes], dict[str, Any]], dialect: type[Dialect] = Dialect) -> Endpoint:
        """The endpoint whose answers one of the methods below makes of a request's body."""
        return with_error_responses(partial(self._answer, answer=answer), dialect)

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
            work = self._gateway.run_in_thread(key, partial(answer, body))
            reply = await cancel_on_disconnect(request.receive, work)
            room.hold(len(reply.get("tokens", ())) * TOKEN_BYTES)
            return JsonResponse(reply)

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """`POST /tokenize`."""
        asked = parse_tokenize_request(body)
        served = self._model(asked.model)
        if isinstance(asked, TokenizeRequest):
            tokens = served.prompts.text(asked.prompt, asked.add_special_tokens)
        else:
            tokens = chat_prompt(asked, served)
        texts = served.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        return {"count": len(tokens), "max_model_len": served.context_length, "tokens": tokens, "token_strs": texts}

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """`POST /detokenize`. Raises `BadRequest` if a token is not the model's."""
        asked = decode_request(DetokenizeRequest, body)
        served = self._model(asked.model)
        if (unknown := next((token for token in asked.tokens if token >= served.vocabulary_size), None)) is not None:
            raise BadRequest(f"token {unknown} is not one of the model's {served.vocabulary_size}", param="tokens")
        return {"prompt": served.tokenizer.decode(asked.tokens, clean_up_tokenization_spaces=False)}

    def count_tokens(self, body: bytes) -> dict[str, Any]:
        """`POST /v1/messages/count_tokens`, which is Anthropic's."""
        asked = read_messages_request(body, CountRequest)
        return {"input_tokens": len(chat_prompt(asked, self._model(asked.model)))}

    def ollama_model(self, body: bytes) -> dict[str, Any]:
        """`POST /api/show`, which is Ollama's."""
        return shown_model(self._gateway.model(decode_request(ShowRequest, body).served_name))

    def _model(self, name: str) -> ServedModel:
        return self._gateway.model(name) if name else next(iter(self._gateway.models.values()))
