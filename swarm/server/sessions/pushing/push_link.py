"""Sending a step's outputs straight to the next server of the route.

A pushed step is an ordinary step that does not come from the client. Pushing is only an optimisation: the client gets
the outputs as well and delivers them itself where a push failed. A push may therefore be lost.
"""

from __future__ import annotations

import asyncio
import logging

from swarm.errors import RemoteError
from swarm.protocol import messages
from swarm.server.sessions.pushing.dial_budget import Dial
from swarm.transport.stream import Network, Stream

logger = logging.getLogger(__name__)

PUSH_CONNECT_TIMEOUT_S = 2.0
"""How long a push waits for the connection to the next server, which is opened when the link is made."""

PUSH_TIMEOUT_S = 5.0
MIN_BYTES_PER_S = 1e5
"""A push of n bytes fails after `PUSH_TIMEOUT_S + n / MIN_BYTES_PER_S` seconds."""


PUSHED_REPLY_DELAY_S = 1e-3
"""Time between a push and the copy for the client. Only the next server waits for the outputs. If both were sent at
once, the copy would delay this push (by a quarter, on one machine) and those of other sessions."""


class PushLink:
    """One session's connection from this server to the next one.

    Args:
        network: this server's end of the network.
        client: peer id of the session's client.
        peer_id: the next server.
        session_id: the session there.
        dial: ends when the next server is reached, or cannot be.
    """

    def __init__(self, network: Network, client: str, peer_id: str, session_id: bytes, dial: Dial) -> None:
        self._client = client
        self._peer_id = peer_id
        self._session_id = session_id
        self._stream: Stream | None = None
        self._broken = False
        self._connected = asyncio.Event()
        self._dial = dial
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._watch(network))

    def leads_to(self, peer_id: str, session_id: bytes) -> bool:
        """Whether it leads to this session at this server, and works."""
        return not self._broken and (peer_id, session_id) == (self._peer_id, self._session_id)

    async def push(self, step: messages.StepRequest, payload: bytes | memoryview) -> bool:
        """Send a step to the next server. False if that failed; True does not guarantee that it arrives."""
        if self._broken:  # possibly before it was connected
            return False
        try:
            if not self._connected.is_set():
                async with asyncio.timeout(PUSH_CONNECT_TIMEOUT_S):
                    await self._connected.wait()
            if self._stream is None or self._broken:
                return False
            async with asyncio.timeout(PUSH_TIMEOUT_S + len(payload) / MIN_BYTES_PER_S):
                await self._stream.send(messages.PushRequest(self._client, self._session_id, step), payload)
        except (TimeoutError, RemoteError) as error:
            logger.debug("pushing to …%s failed: %r", self._peer_id[-6:], error)
            self._broken = True
            return False
        return True

    def close(self) -> None:
        """Push no more steps."""
        self._broken = True
        self._dial.give_up()
        if self._task is not None:
            self._task.cancel()
            self._task = None  # a canceled task keeps what it has done, and with it this link
        if self._stream is not None:
            self._stream.close()

    async def _watch(self, network: Network) -> None:
        """Connect, then wait: the next server only ever sends an error, or closes the connection."""
        try:
            self._stream = await network.open_stream(self._peer_id)
            self._dial.reached(asyncio.get_running_loop().time())
            self._connected.set()
            await self._stream.receive(0)
        except RemoteError as error:
            logger.debug("the link to …%s is gone: %s", self._peer_id[-6:], error)
            self._dial.failed()
        finally:
            self._dial.give_up()
            self._broken = True
            self._connected.set()
            if self._stream is not None:
                self._stream.close()
