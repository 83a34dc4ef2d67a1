"""Responses that are kept, so that a conversation goes on by naming its last one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from swarm.gateway.dialects.openai_responses import InputItem
from swarm.gateway.openai.api_errors import BadRequest, NotFound
from swarm.generation.prefix_store import make_room

STORE_BYTES = 64 * 2**20
MAX_RESPONSES = 1 << 14


@dataclass(frozen=True)
class StoredResponse:
    """A response and what was asked, in JSON.

    Attributes:
        previous: the id of the response before; None if it began the conversation.
    """

    id: str
    previous: str | None
    input: bytes
    body: bytes

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return len(self.input) + len(self.body)

    @property
    def output(self) -> list[InputItem]:
        """What was answered, as items of a later request."""
        return msgspec.convert(msgspec.json.decode(self.body)["output"], list[InputItem])


class ResponseStore:
    """The latest responses of all owners, in this process's memory. Its methods may be called from any thread.

    Only its owner finds a response. If memory is short, the owner with the most bytes loses its least recently used.

    Args:
        capacity: bytes that all may take.
    """

    def __init__(self, capacity: int = STORE_BYTES) -> None:
        self._capacity = capacity
        self._kept: list[tuple[str, StoredResponse]] = []  # the least recently used first
        self._lock = threading.Lock()

    def add(self, owner: str, previous: str | None, asked: Sequence[InputItem], body: dict[str, Any]) -> None:
        """Keep a response."""
        stored = StoredResponse(body["id"], previous, msgspec.json.encode(asked), msgspec.json.encode(body))
        with self._lock:
            self._kept.append((owner, stored))
            make_room(self._kept, self._capacity, MAX_RESPONSES)

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """Raises `NotFound` if the owner has no such response, or it is not kept any more."""
        with self._lock:
            for its, stored in self._kept:
                if (its, stored.id) == (owner, response_id):
                    return stored
        raise NotFound(_missing("response", response_id), code="not_found")

    def delete(self, owner: str, response_id: str) -> None:
        """Raises the same as `get`."""
        stored = self.get(owner, response_id)
        with self._lock:
            self._kept = [entry for entry in self._kept if entry[1] is not stored]

    def conversation(self, owner: str, last: str | None, asked: Sequence[InputItem], most: int) -> list[InputItem]:
        """All of a conversation, with references replaced by what they name.

        Args:
            last: the response that comes before what is asked; None if there is none.
            most: bytes that all responses of a conversation may have.

        Raises:
            BadRequest: something is not kept any more, or there are too many bytes.
        """
        with self._lock:
            own = {stored.id: stored for its, stored in self._kept if its == owner}
        chain: list[StoredResponse] = []
        while last is not None:
            if last not in own:
                raise BadRequest(
                    f"{_missing('response', last)}; send the whole conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            chain.append(own[last])
            last = own[last].previous
        chain.reverse()
        if sum(stored.bytes for stored in chain) > most:
            raise BadRequest(f"the conversation is larger than {most} bytes", param="previous_response_id")
        self._touch(chain)
        items: list[InputItem] = []
        for stored in chain:
            items += [*msgspec.json.decode(stored.input, type=list[InputItem]), *stored.output]
        return items + _resolved(asked, own.values())

    def _touch(self, chain: Sequence[StoredResponse]) -> None:
        """What is used now is given up last."""
        used = {stored.id for stored in chain}
        with self._lock:
            self._kept.sort(key=lambda entry: entry[1].id in used)


def _resolved(asked: Sequence[InputItem], kept: Iterable[StoredResponse]) -> list[InputItem]:
    """The items, with those that name another one replaced by that."""
    if not any(item.type == "item_reference" for item in asked):
        return list(asked)
    known = {item.id: item for stored in kept for item in stored.output}
    if unknown := [item.id for item in asked if item.type == "item_reference" and item.id not in known]:
        raise BadRequest(_missing("item", unknown[0] or ""), param="input")
    return [known[item.id] if item.type == "item_reference" else item for item in asked]


def _missing(kind: str, name: str) -> str:
    return f"there is no {kind} {name[:100]!r}, or it is not kept any more"
