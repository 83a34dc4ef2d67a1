"""Steps that come from the session's previous server, and where a session's outputs go on to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from swarm.errors import PeerLost, RemoteError
from swarm.protocol import messages
from swarm.server.compute.compute_request import Bytes
from swarm.server.sessions.pushing.dial_budget import DialBudget
from swarm.server.sessions.pushing.local_push_link import LocalPushLink, Push
from swarm.server.sessions.pushing.push_link import PushLink
from swarm.server.sessions.pushing.unread_replies import UnreadReplies
from swarm.server.sessions.replies import Answer, Replies
from swarm.server.sessions.session import Session
from swarm.server.sessions.session_steps import SessionSteps, StepOutcome
from swarm.server.sessions.session_table import SessionTable
from swarm.server.sessions.unanswered_requests import UnansweredRequests
from swarm.transport.stream import Network


class PushedSteps:
    """Answers the steps that are pushed into the sessions of one server.

    Args:
        unanswered: counts the server's requests.
    """

    def __init__(
        self,
        network: Network,
        sessions: SessionTable,
        steps: SessionSteps,
        replies: Replies,
        unanswered: UnansweredRequests,
    ) -> None:
        self._network = network
        self._sessions = sessions
        self._steps = steps
        self._replies = replies
        self._unanswered = unanswered
        self._waiting_bytes: Counter[str] = Counter()
        self._unread = UnreadReplies(unanswered)
        self._dials = DialBudget(network.knows)

    def set_neighbors(self, session: Session, message: messages.SetNeighbors) -> None:
        """Who may push into the session, and where its outputs go. Raises `UnknownSession` if it is not open.

        A link that leads there already stays, with the steps in it: the client counts them as pushed. There is no link
        if the client has named too many peers (see `DialBudget`): then it delivers the outputs itself.
        """
        self._sessions.require_open(session)  # nothing would ever close the link of a session that is forgotten
        session.allow_push_from(message.previous_peer, message.sequences)
        peer_id, session_id, client = message.next_peer, message.next_session_id, session.terms.peer_id
        if peer_id is None or session_id is None:
            session.close_push_link()
        elif session.push_link is None or not session.push_link.leads_to(peer_id, session_id):
            session.close_push_link()
            if peer_id == self._network.peer_id:
                session.push_link = self._local_link(client, session_id)
            elif (dial := self._dials.begin(client, peer_id, asyncio.get_running_loop().time())) is not None:
                session.push_link = PushLink(self._network, client, peer_id, session_id, dial)

    def give_up(self, session: Session, message: messages.GiveUp) -> None:
        """The session's client does not want these steps any more."""
        session.give_up(message.first, message.end)
        if session.fed_by is not None:
            session.fed_by.deliver_due()

    def expedite(self, session: Session, message: messages.Expedite) -> None:
        """The session's client waits for the steps up to this one."""
        self._steps.expedite(session, message.last)
        if session.fed_by is not None:
            session.fed_by.deliver_due()

    def _local_link(self, client: str, session_id: bytes) -> LocalPushLink:
        """A link to another session of the same client at this server. It holds steps back only if that is open."""
        target = self._sessions.find(client, session_id)
        link = LocalPushLink(
            client,
            self._network.peer_id,
            session_id,
            self._answer_own,
            target.holds_back if target is not None else lambda steps: False,
            self._unanswered,
            self._waiting_bytes,
        )
        if target is not None:
            if target.fed_by is not None:  # only one link is told when steps become urgent
                target.fed_by.hold_no_more()
            target.fed_by = link
        return link

    async def answer(self, peer_id: str, message: messages.PushRequest, payload: Bytes) -> None:
        """A step from the previous server. Its reply or refusal goes to the client, not to the server that pushed.

        But for what that server can only do out of malice: it changes nothing, and the client does not hear of it.
        Raises `UnknownSession` if that server may not push there, or not so many sequences; `WrongPosition` if the
        step's number is beyond all that may come.
        """
        session, answer = await self._compute(peer_id, message, payload)
        await self._send(session, answer)

    async def _compute(self, peer_id: str, message: messages.PushRequest, payload: Bytes) -> tuple[Session, Answer]:
        """The session of a pushed step, and what to say to its client."""
        session = await self._find(peer_id, message)
        session.require_near(message.step.step)
        handling = self._steps.run_step(session, message.step, payload, asked_by_client=False)
        return session, await self._replies.answer_or_refuse(handling, message, message.client, message.step.step)

    async def _answer_own(self, pushes: Sequence[Push]) -> None:
        """Successive steps from a session of this server to another one of the same client.

        Those behind them do not wait until the client has read the answers.
        """
        if len(pushes) > 1:
            message = pushes[0][0]
            session = await self._find(self._network.peer_id, message)
            outcomes = await self._steps.run_merged(session, [(push.step, payload) for push, payload in pushes])
            if outcomes is not None:
                await self._push_and_answer(session, [push.step for push, _ in pushes], outcomes)
                return
        for push, payload in pushes:
            await self._send_soon(*await self._compute(self._network.peer_id, push, payload))

    async def _find(self, peer_id: str, message: messages.PushRequest) -> Session:
        is_own, rows = peer_id == self._network.peer_id, len(message.step.counts)
        return await self._sessions.find_for_push(peer_id, message.client, message.session_id, rows, is_own=is_own)

    async def _push_and_answer(
        self, session: Session, steps: Sequence[messages.StepRequest], outcomes: Sequence[StepOutcome]
    ) -> None:
        """Push the outputs of steps that were computed as one, so that they can stay together, then answer all."""
        answers: list[Answer] = []
        for step, (outcome, output) in zip(steps, outcomes, strict=True):
            if isinstance(outcome, RemoteError):
                answers.append((self._replies.refuse(outcome, step.step), b""))
            elif outcome is not None:
                answers.append((await self._steps.push_outputs(session, step, outcome, output), output))
        for number, answer in enumerate(answers):
            await self._send_soon(session, answer, delayed=not number)  # the others wait for the first one anyway

    async def _send_soon(self, session: Session, answer: Answer, *, delayed: bool = True) -> None:
        """Begin to send an answer, see `_send`."""
        reply, output = answer
        if reply is not None:
            send = partial(self._send, session, answer, delayed=delayed)
            await self._unread.send(session.terms.peer_id, len(output), send)

    async def _send(self, session: Session, answer: Answer, *, delayed: bool = True) -> None:
        """Send an answer to the session's client. The copy of outputs that were pushed is `delayed` a little."""
        reply, output = answer
        if reply is not None and session.client is not None:
            with suppress(PeerLost):  # a client that is away may ask again
                await self._replies.send(session.client, reply, output, session if delayed else None)
