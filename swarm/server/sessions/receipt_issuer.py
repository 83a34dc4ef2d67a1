"""Signs receipts of this server's sessions."""

from __future__ import annotations

import asyncio

from swarm.common.dtypes import dtype_name
from swarm.errors import WrongPosition
from swarm.protocol.messages import Receipt
from swarm.server.sessions.session import Session
from swarm.transport.stream import Network
from swarm.trust.receipts import ServedBlocks, make_statement, sign_statement, weights_digest


class ReceiptIssuer:
    """Signs what sessions have come to, in a thread: a signature takes about a millisecond.

    A session gets one signature for each of its steps at most, so a client cannot make a server sign more often than
    it makes it compute.

    Args:
        network: signs with this server's identity.
        revision: of the model.
        quantization: form of the weights, as it is announced.
    """

    def __init__(self, network: Network, revision: str, quantization: str) -> None:
        self._network = network
        self._revision = revision
        self._quantization = quantization

    async def issue(self, session: Session, step: int) -> Receipt:
        """The receipt of a session up to one of its newest steps. Raises `WrongPosition` if that does not stand, or if
        one of a later step was signed before."""
        totals = session.record.totals(step)
        if totals is None:
            raise WrongPosition(f"step {step} is not among the newest of the session that stand")
        if session.receipt is not None:
            signed, receipt = session.receipt
            if signed == totals:
                return receipt
            if totals.number < signed.number:
                raise WrongPosition(f"a receipt up to step {signed.number} was signed before")
        terms = session.terms
        statement = make_statement(
            self._network.peer_id,
            terms.peer_id,
            terms.session_id,
            self._served_blocks(session),
            terms.reply_format,
            terms.adapters,
            terms.early_exits,
            totals,
        )
        receipt = await asyncio.to_thread(sign_statement, statement, self._network.sign)
        session.receipt = totals, receipt
        return receipt

    def _served_blocks(self, session: Session) -> ServedBlocks:
        span, model = session.terms.span, session.cache.model
        return ServedBlocks(
            self._revision,
            span.start,
            span.end,
            weights_digest(model.digests),
            dtype_name(model.dtype),
            self._quantization,
            model.flash is not None and model.flash.sparse,
        )
