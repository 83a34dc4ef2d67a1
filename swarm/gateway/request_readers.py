"""How each interface's requests become sequences to generate, and which writer answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarm.gateway.dialects.anthropic_messages import MessageWriter, read_messages_request
from swarm.gateway.dialects.ollama import OLLAMA, OllamaChatRequest, OllamaGenerateRequest, OllamaWriter
from swarm.gateway.dialects.openai_responses import RESPONSES, ResponsesRequest, ResponsesWriter
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.request_body import TOKEN_BYTES
from swarm.gateway.openai.refused_fields import EMBEDDING
from swarm.gateway.openai.request_conversion import chat_request_sequences, completion_request_sequences
from swarm.gateway.openai.request_schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    decode_request,
    parse_chat_request,
    parse_completion_request,
)
from swarm.gateway.openai.response_writers import (
    ChatResponseWriter,
    CompletionResponseWriter,
    EmbeddingResponseWriter,
    ResponseWriter,
)
from swarm.generation.prompts import embedding_sequences, prompt_texts
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.served_model import ServedModel


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is ready to be generated: its sequences, and the writer of its response."""

    sequences: list[SequenceRequest]
    writer: ResponseWriter

    @property
    def prompt_bytes(self) -> int:
        """What all different prompts and their images take in memory; the answers to one share it."""
        different = {id(sequence.prompt): sequence for sequence in self.sequences}.values()
        return sum(len(one.prompt) * TOKEN_BYTES + (one.images.bytes if one.images else 0) for one in different)

    @property
    def reserved_tokens(self) -> int:
        """The most tokens that prompts and answers may have together."""
        return sum(len(sequence.prompt) + sequence.limit for sequence in self.sequences)


@dataclass(frozen=True)
class ReadRequest:
    """A request as far as it is known before its model has seen it.

    Attributes:
        model: its name.
        stream: whether the response is streamed.
        prepare: makes sequences of it, which takes a while; None if nothing has to be generated.
        choices: answers to each prompt.
        provisional: whether text that is not verified yet is asked for.
        known: the response then.
    """

    model: str
    stream: bool | None = False
    prepare: Callable[[ServedModel], PreparedRequest] | None = None
    choices: int = 1
    provisional: bool = False
    known: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, asked: GenerationRequest, prepare: Callable[[ServedModel], PreparedRequest]) -> ReadRequest:
        return cls(asked.model, asked.stream, prepare, asked.n or 1, asked.provisional)


Reader = Callable[[bytes, str], ReadRequest]
"""From a body, and whose request it is, to the request. Raises `BadRequest` if it is not valid."""


class RequestReaders:
    """Reads the requests of all interfaces."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway

    def chat(self, body: bytes, owner: str) -> ReadRequest:
        """OpenAI's chat completions."""
        asked = parse_chat_request(body)

        def prepare(served: ServedModel) -> PreparedRequest:
            sequences = chat_request_sequences(asked, served, self._gateway.settings)
            writer = ChatResponseWriter(
                served.name, served.tokenizer, include_usage=asked.include_usage, fingerprint=served.fingerprint
            )
            return PreparedRequest(sequences, writer)

        return ReadRequest.of(asked, prepare)

    def completion(self, body: bytes, owner: str) -> ReadRequest:
        """OpenAI's completions."""
        asked = parse_completion_request(body)

        def prepare(served: ServedModel) -> PreparedRequest:
            sequences = completion_request_sequences(asked, served, self._gateway.settings)
            echo = prompt_texts(sequences, served) if asked.echo else []
            writer = CompletionResponseWriter(
                served.name, served.tokenizer, echo, include_usage=asked.include_usage, fingerprint=served.fingerprint
            )
            return PreparedRequest(sequences, writer)

        return ReadRequest.of(asked, prepare)

    def embeddings(self, body: bytes, owner: str) -> ReadRequest:
        """OpenAI's embeddings."""
        asked = decode_request(EmbeddingRequest, body, EMBEDDING)

        def prepare(served: ServedModel) -> PreparedRequest:
            writer = EmbeddingResponseWriter(served.name, asked.encoding_format == "base64")
            return PreparedRequest(embedding_sequences(served, asked.prompts()), writer)

        return ReadRequest(asked.model, False, prepare)

    def responses(self, body: bytes, owner: str) -> ReadRequest:
        """OpenAI's Responses."""
        asked = decode_request(ResponsesRequest, body, RESPONSES)
        previous, store = asked.previous_response_id, self._gateway.responses

        def prepare(served: ServedModel) -> PreparedRequest:
            items = store.conversation(owner, previous, asked.items, self._gateway.settings.max_request_bytes)
            sequences = self._sequences(asked.chat(items), served)
            keep = partial(store.add, owner, previous, asked.items)
            return PreparedRequest(sequences, ResponsesWriter(asked, sequences[0], served.tokenizer, keep))

        return ReadRequest(asked.model, asked.stream, prepare)

    def messages(self, body: bytes, owner: str) -> ReadRequest:
        """Anthropic's Messages."""
        chat = read_messages_request(body)

        def prepare(served: ServedModel) -> PreparedRequest:
            return PreparedRequest(self._sequences(chat, served), MessageWriter(served.name, served.context_length))

        return ReadRequest.of(chat, prepare)

    def ollama_chat(self, body: bytes, owner: str) -> ReadRequest:
        """Ollama's conversations."""
        return self._ollama(decode_request(OllamaChatRequest, body, OLLAMA), is_chat=True)

    def ollama_generate(self, body: bytes, owner: str) -> ReadRequest:
        """Ollama's prompts."""
        return self._ollama(decode_request(OllamaGenerateRequest, body, OLLAMA), is_chat=False)

    def _ollama(self, read: OllamaChatRequest | OllamaGenerateRequest, is_chat: bool) -> ReadRequest:
        asked = read.openai()
        if asked is None:
            self._gateway.model(read.served_name)
            return ReadRequest(read.served_name, known=OllamaWriter(read.model, None, is_chat).loaded())

        def prepare(served: ServedModel) -> PreparedRequest:
            if isinstance(asked, CompletionRequest):
                sequences = completion_request_sequences(asked, served, self._gateway.settings)
            else:
                sequences = self._sequences(asked, served)
            return PreparedRequest(sequences, OllamaWriter(read.model, served.tokenizer, is_chat))

        return ReadRequest.of(asked, prepare)

    def _sequences(self, chat: ChatRequest, served: ServedModel) -> list[SequenceRequest]:
        """The sequences of another interface's request. There, a limit beyond the context is none."""
        return chat_request_sequences(chat, served, self._gateway.settings, max_tokens_fit=True)
