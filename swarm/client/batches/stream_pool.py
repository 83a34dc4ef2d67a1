"""Streams to servers, kept open between requests: opening one costs a way there and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm.errors import PeerLost, PeerTimeout
from swarm.transport.stream import Network, Stream

T = TypeVar("T")

IDLE_TIMEOUT_S = 30.0
"""Seconds after which a stream that nobody uses is closed."""

MAX_IDLE_STREAMS_PER_SERVER = 8
"""Streams that are kept open to one server while nobody uses them."""


class StreamPool:
    """Streams on which nothing is under way. For the network loop.

    Args:
        network: this client's place in the network.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._idle: dict[str, dict[Stream, asyncio.TimerHandle]] = {}

    async def talk(self, peer_id: str, conversation: Callable[[Stream], Awaitable[T]]) -> T:
        """What the conversation returns, over a stream that is kept if that ends well.

        The server may have closed a stream that lay idle. Then the conversation begins again over a new one.
        """
        stream = self._taken(peer_id)
        if stream is not None:
            try:
                return await self._talk(peer_id, stream, conversation)
            except PeerTimeout:
                raise
            except PeerLost:
                self._drop(peer_id)  # what closed one of them closed all
        return await self._talk(peer_id, await self._network.open_stream(peer_id), conversation)

    def close(self) -> None:
        """Close all that are idle."""
        for peer_id in list(self._idle):
            self._drop(peer_id)

    async def _talk(self, peer_id: str, stream: Stream, conversation: Callable[[Stream], Awaitable[T]]) -> T:
        try:
            result = await conversation(stream)
        except BaseException:
            stream.close()  # an answer may still come
            raise
        self._keep(peer_id, stream)
        return result

    def _taken(self, peer_id: str) -> Stream | None:
        """The stream that was used last."""
        idle = self._idle.get(peer_id)
        if not idle:
            return None
        stream, timer = idle.popitem()
        timer.cancel()
        self._tidy(peer_id)
        return stream

    def _keep(self, peer_id: str, stream: Stream) -> None:
        idle = self._idle.setdefault(peer_id, {})
        if len(idle) >= MAX_IDLE_STREAMS_PER_SERVER:
            stream.close()
        else:
            idle[stream] = asyncio.get_running_loop().call_later(IDLE_TIMEOUT_S, self._expire, peer_id, stream)

    def _expire(self, peer_id: str, stream: Stream) -> None:
        del self._idle[peer_id][stream]
        self._tidy(peer_id)
        stream.close()

    def _drop(self, peer_id: str) -> None:
        for stream, timer in self._idle.pop(peer_id, {}).items():
            timer.cancel()
            stream.close()

    def _tidy(self, peer_id: str) -> None:
        if not self._idle[peer_id]:
            del self._idle[peer_id]
