"""What a server signs for a session, and what the owner of this client's points signs for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from swarm.client.wire.reply_checks import describe_hop
from swarm.data_structures import Hop
from swarm.errors import PeerTimeout, ProtocolViolation, RemoteError
from swarm.protocol import messages
from swarm.trust.receipts import ServedBlocks, make_statement, require_same
from swarm.trust.session_record import SessionRecord

if TYPE_CHECKING:
    from swarm.client.hops.hop_session import SessionContext

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
"""Seconds that a server gets to sign a receipt, and to take a tab."""

T = TypeVar("T")
Send = Callable[[messages.Message, bytes, float], Awaitable[None]]


class Settlement:
    """Receipts of one session at one server, and the tabs that go with them.

    Args:
        session_id: of the session at the server.
        record: what the server has computed, as this client knows it.
    """

    def __init__(self, context: SessionContext, hop: Hop, session_id: bytes, record: SessionRecord) -> None:
        self._context = context
        self._hop = hop
        self._session_id = session_id
        self._record = record
        self._signed = 0  # token-blocks for which the owner of the points has signed
        # What was asked for and has not come, including what nobody waits for any more; a receipt with its step.
        self._receipts: deque[tuple[int, asyncio.Future[messages.Receipt]]] = deque()
        self._tabs: deque[asyncio.Future[messages.Signed | None]] = deque()

    async def receipt(self, send: Send) -> messages.Receipt | None:
        """See `HopSession.receipt`; `send` sends a message to the server."""
        number = self._record.last
        totals = self._record.totals(number) if number is not None else None
        if totals is None:
            return None
        context, span = self._context, self._hop.span
        expected = make_statement(
            self._hop.server.peer_id,
            context.network.peer_id,
            self._session_id,
            ServedBlocks.of(self._hop.server, span),
            context.options.wire,
            context.adapter.adapter.digests(span),
            context.early_exits,
            totals,
        )
        answer: asyncio.Future[messages.Receipt] = asyncio.get_running_loop().create_future()
        self._receipts.append((totals.number, answer))
        found = await self._ask(send, messages.ReceiptRequest(totals.number), answer)
        try:
            require_same(found, expected)
        except ProtocolViolation as error:
            raise ProtocolViolation(f"{describe_hop(self._hop)}: {error}") from None
        return found

    async def settle(self, send: Send) -> None:
        """Get a receipt, if receipts are kept or points are spent, and sign a tab for what it says."""
        kept, wallet, peer_id = self._context.kept_receipts, self._context.wallet, self._hop.server.peer_id
        if kept is None and wallet is None:
            return

        async def give(tab: messages.Signed) -> messages.Signed | None:
            answer: asyncio.Future[messages.Signed | None] = asyncio.get_running_loop().create_future()
            self._tabs.append(answer)
            return await self._ask(send, messages.SignedTab(tab), answer)

        try:
            if (receipt := await self.receipt(send)) is None:
                return
            if kept is not None:
                kept[self._session_id] = receipt
            if wallet is not None:
                served = self._record.tokens * self._hop.span.length
                await wallet.sign(peer_id, served - self._signed, give)
                self._signed = served
        except RemoteError as error:
            logger.info("%s did not settle: %s", describe_hop(self._hop), error)
            if isinstance(error, ProtocolViolation):
                self._context.routes.report_failure(peer_id, error)

    def begin_again(self) -> None:
        """The session continues over a new connection: what was asked for will not come."""
        self._receipts.clear()
        self._tabs.clear()

    def on_reply(self, reply: messages.Receipt | messages.TabKept) -> bool:
        """An answer has come; False if nothing was asked for."""
        if isinstance(reply, messages.Receipt) and self._receipts:
            _resolve(self._receipts.popleft()[1], reply)
        elif isinstance(reply, messages.TabKept) and self._tabs:
            _resolve(self._tabs.popleft(), reply.tab)
        else:
            return False
        return True

    def on_refused(self, error: RemoteError, step: int | None) -> bool:
        """The server refuses something; whether it is a receipt."""
        if not self._receipts or step != self._receipts[0][0]:
            return False
        _fail(self._receipts.popleft()[1], error)
        return True

    def fail(self, error: Exception) -> None:
        """The server is lost: nothing more will come."""
        for _, receipt in self._receipts:
            _fail(receipt, error)
        for tab in self._tabs:
            _fail(tab, error)

    async def _ask(self, send: Send, message: messages.Message, answer: asyncio.Future[T]) -> T:
        try:
            await send(message, b"", ANSWER_TIMEOUT_S)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise PeerTimeout(f"{describe_hop(self._hop)} signed nothing within {ANSWER_TIMEOUT_S:.0f} s") from None


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
