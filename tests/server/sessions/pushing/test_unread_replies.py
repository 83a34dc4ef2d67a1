"""Replies that are sent while their client does not read."""

from __future__ import annotations

import asyncio

import pytest

from swarm.server.sessions.pushing import unread_replies
from swarm.server.sessions.pushing.unread_replies import REPLY_BYTES, UnreadReplies
from swarm.server.sessions.unanswered_requests import UnansweredRequests
from tests import virtual_time

SECONDS = 5.0
"""How long a client takes to read a reply."""


def test_replies_wait_for_room_and_each_client_has_its_own(monkeypatch):
    monkeypatch.setattr(unread_replies, "MAX_UNREAD_BYTES", 100 + 2 * REPLY_BYTES)

    async def scenario():
        loop, unanswered = asyncio.get_running_loop(), UnansweredRequests()
        replies = UnreadReplies(unanswered)

        async def read() -> None:
            await asyncio.sleep(SECONDS)

        async def waits(client: str, size: int) -> float:
            began = loop.time()
            await replies.send(client, size, read)
            return loop.time() - began

        assert [await waits("slow", 50), await waits("slow", 50)] == [0, 0]
        assert await waits("other", 1000) == 0, "one reply of any size is on its way in any case"
        assert await waits("slow", 1) == SECONDS
        await unanswered.none()
        assert loop.time() == pytest.approx(2 * SECONDS)
        assert not replies._sizes

    virtual_time.run(scenario)


def test_a_reply_that_fails_is_logged_and_leaves_room(caplog):
    async def scenario():
        unanswered = UnansweredRequests()
        replies = UnreadReplies(unanswered)

        async def fail() -> None:
            raise RuntimeError("a bug")

        await replies.send("client", 10, fail)
        await unanswered.none()
        assert not replies._sizes
        assert "answering a step of …client failed" in caplog.text

    virtual_time.run(scenario)
