"""Pool of idle streams to servers: opening a new stream for each request would cost a round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm.errors import PeerLost, PeerTimeout
from swarm.transport.stream import Network, Stream

T = TypeVar("T")

IDLE_TIMEOUT_S = 30.0
"""Seconds after which an idle stream is closed."""

MAX_IDLE_STREAMS_PER_SERVER = 8
"""Idle streams that are kept open to one server."""


class StreamPool:
    """Idle streams by server. For the network thread.

    Args:
        network: opens streams.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._idle: dict[str, dict[Stream, asyncio.TimerHandle]] = {}

    async def exchange(self, peer_id: str, conversation: Callable[[Stream], Awaitable[T]]) -> T:
        """Run `conversation` on an idle stream or a new one, and return its result. The stream is kept if it succeeds.

        If the server has closed the idle stream meanwhile, the conversation runs again on a new one.
        """
        stream = self._take_idle(peer_id)
        if stream is not None:
            try:
                return await self._run(peer_id, stream, conversation)
            except PeerTimeout:
                raise
            except PeerLost:
                self._close_idle(peer_id)  # what closed this one has probably closed them all
        return await self._run(peer_id, await self._network.open_stream(peer_id), conversation)

    def close(self) -> None:
        """Close all idle streams."""
        for peer_id in list(self._idle):
            self._close_idle(peer_id)

    async def _run(self, peer_id: str, stream: Stream, conversation: Callable[[Stream], Awaitable[T]]) -> T:
        try:
            result = await conversation(stream)
        except BaseException:
            stream.close()  # a late reply must not reach another request
            raise
        self._keep(peer_id, stream)
        return result

    def _take_idle(self, peer_id: str) -> Stream | None:
        """The idle stream that was used last, or None."""
        idle = self._idle.get(peer_id)
        if not idle:
            return None
        stream, timer = idle.popitem()
        timer.cancel()
        self._remove_if_empty(peer_id)
        return stream

    def _keep(self, peer_id: str, stream: Stream) -> None:
        idle = self._idle.setdefault(peer_id, {})
        if len(idle) >= MAX_IDLE_STREAMS_PER_SERVER:
            stream.close()
        else:
            idle[stream] = asyncio.get_running_loop().call_later(IDLE_TIMEOUT_S, self._expire, peer_id, stream)

    def _expire(self, peer_id: str, stream: Stream) -> None:
        del self._idle[peer_id][stream]
        self._remove_if_empty(peer_id)
        stream.close()

    def _close_idle(self, peer_id: str) -> None:
        for stream, timer in self._idle.pop(peer_id, {}).items():
            timer.cancel()
            stream.close()

    def _remove_if_empty(self, peer_id: str) -> None:
        if not self._idle[peer_id]:
            del self._idle[peer_id]
