"""Which responses are kept, and who finds them."""

from __future__ import annotations

import pytest

from swarm.gateway.dialects.openai_responses import InputItem
from swarm.gateway.openai.api_errors import BadRequest, NotFound
from swarm.gateway.response_store import ResponseStore

MOST = 1 << 20


def said(text: str) -> list[InputItem]:
    return [InputItem(role="user", content=text)]


def body(name: str, text: str = "") -> dict[str, object]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": name, "output": [{"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]}]}


def texts(items: list[InputItem]) -> list[str]:
    contents = (one.content for one in items)
    return ["".join(part.text for part in one) if isinstance(one, list) else str(one) for one in contents]


def test_a_conversation_is_found_by_its_owner_alone() -> None:
    store = ResponseStore()
    store.add("a", None, said("1"), body("r1", "2"))
    store.add("a", "r1", said("3"), body("r2", "4"))
    assert texts(store.conversation("a", "r2", said("5"), MOST)) == ["1", "2", "3", "4", "5"]
    assert texts(store.conversation("a", "r1", said("6"), MOST)) == ["1", "2", "6"]
    named = InputItem(type="item_reference", id="msg_r2")
    assert texts(store.conversation("a", None, [named, *said("5")], MOST)) == ["4", "5"]
    for owner, last, asked in (("b", "r2", said("5")), ("b", None, [named])):
        with pytest.raises(BadRequest, match="not kept any more"):
            store.conversation(owner, last, asked, MOST)
    with pytest.raises(NotFound):
        store.get("b", "r1")
    with pytest.raises(BadRequest, match="larger than 10 bytes"):
        store.conversation("a", "r1", said("6"), 10)


def test_what_is_used_is_given_up_last_by_the_owner_with_the_most() -> None:
    store = ResponseStore(4000)
    store.add("b", None, said("x" * 500), body("other"))
    store.add("a", None, said("x" * 500), body("old"))
    store.add("a", None, said("x" * 500), body("older"))
    store.conversation("a", "old", said("5"), MOST)
    for number in range(3):
        store.add("a", None, said("x" * 500), body(f"new{number}"))
    store.get("b", "other")
    store.get("a", "old")
    with pytest.raises(NotFound):
        store.get("a", "older")
    store.delete("a", "old")
    with pytest.raises(NotFound):
        store.get("a", "old")
