"""From what comes of a message to what its client is sent."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from swarm.errors import ProtocolViolation, RemoteError, ServerFault
from swarm.metrics.server import ServerObserver
from swarm.protocol import messages
from swarm.server.compute.compute_request import Bytes
from swarm.server.sessions.pushing.push_link import PUSHED_REPLY_DELAY_S
from swarm.server.sessions.reply_stream import ReplyStream
from swarm.server.sessions.session import Session

logger = logging.getLogger(__name__)

Answer = tuple[messages.Message | None, Bytes]
"""A reply, or None where the message is not answered, and its payload."""


class Replies:
    """Sends the replies and refusals of one server.

    Args:
        observer: is told of refusals and payloads.
    """

    def __init__(self, observer: ServerObserver) -> None:
        self._observer = observer

    async def answer_or_refuse(
        self, handling: Awaitable[Answer], message: messages.Message, client: str, step: int | None
    ) -> Answer:
        """The answer to a message, or a refusal. Raises `ProtocolViolation`, which ends the stream.

        Computing may raise anything. A fault of this server must not end the stream of the client, which learns only
        that it happened; the log says what it was.
        """
        try:
            return await handling
        except ProtocolViolation:
            raise
        except RemoteError as error:
            return self.refuse(error, step), b""
        except Exception as error:
            kind, peer = type(message).__name__, client[-6:]
            extra = {"request": kind, "peer": peer}
            logger.error("a %s of peer …%s failed", kind, peer, exc_info=error, extra=extra)
            fault = ServerFault("the computation failed at this server; its log says why")
            return self.refuse(fault, step), b""

    def refuse(self, error: RemoteError, step: int | None) -> messages.Refusal:
        """Say why a message is refused."""
        self._observer.request_refused(error.code)
        return messages.refusal(error, step)

    async def send(
        self, stream: ReplyStream, reply: messages.Message, payload: Bytes, session: Session | None = None
    ) -> None:
        """Send an answer. The copy of outputs that were pushed waits until the push is under way.

        Args:
            session: that of the answer; None if it need not wait.
        """
        link = session.push_link if session is not None else None
        if isinstance(reply, messages.StepReply) and reply.pushed and link is not None:
            await stream.send_later(PUSHED_REPLY_DELAY_S, reply, payload)
        else:
            await stream.send(reply, payload)
        self._observer.payload_sent(len(payload))
