"""Requests about a model's tokenizer, as vLLM has them: tokens of a text or a conversation, and the text of tokens."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.request_conversion import template_message, template_options, tool_options
from swarm.gateway.openai.request_schema import PromptRequest, TokenId, decode_request, parse_prompt_request
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
    head: _TokenizeHead = decode_request(_TokenizeHead, body)
    if head.prompt is not None:
        request: TokenizeRequest = decode_request(TokenizeRequest, body)
        return request
    return parse_prompt_request(body)


def parse_detokenize_request(body: bytes) -> DetokenizeRequest:
    """Raises `BadRequest` if the body is not a valid request."""
    request: DetokenizeRequest = decode_request(DetokenizeRequest, body)
    return request


def tokenize_reply(request: TokenizeRequest | PromptRequest, served: ServedModel) -> dict[str, Any]:
    """The tokens of a prompt.

    Raises:
        ChatTemplateError, InvalidGenerationRequest, BadRequest: as for a chat request.
    """
    if isinstance(request, TokenizeRequest):
        tokens = served.prompts.text(request.prompt, request.add_special_tokens)
    else:
        messages = [template_message(message) for message in request.messages]
        tokens = conversation_prompt(served, messages, tool_options(request), template_options(request, served))
    texts = served.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": served.context_length, "tokens": tokens, "token_strs": texts}


def detokenize_reply(request: DetokenizeRequest, served: ServedModel) -> dict[str, Any]:
    """The text of tokens.

    Raises:
        BadRequest: one of them is not the model's.
    """
    if (unknown := next((token for token in request.tokens if token >= served.vocabulary_size), None)) is not None:
        raise BadRequest(f"token {unknown} is not one of the model's {served.vocabulary_size}", param="tokens")
    return {"prompt": served.tokenizer.decode(request.tokens, clean_up_tokenization_spaces=False)}


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
