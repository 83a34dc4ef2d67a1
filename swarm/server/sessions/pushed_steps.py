"""Steps that come from the session's previous server, and where a session's outputs go on to."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.server.compute.compute_request import Bytes
from swarm.server.sessions.pushing.dial_budget import DialBudget
from swarm.server.sessions.pushing.push_link import PushLink
from swarm.server.sessions.replies import Replies
from swarm.server.sessions.session import Session
from swarm.server.sessions.session_steps import SessionSteps
from swarm.server.sessions.session_table import SessionTable
from swarm.transport.stream import Network


class PushedSteps:
    """Answers the steps that are pushed into the sessions of one server."""

    def __init__(self, network: Network, sessions: SessionTable, steps: SessionSteps, replies: Replies) -> None:
        self._network = network
        self._sessions = sessions
        self._steps = steps
        self._replies = replies
        self._dials = DialBudget(network.knows)

    def set_neighbors(self, session: Session, message: messages.SetNeighbors) -> None:
        """Who may push into the session, and where its outputs go. Raises `UnknownSession` if it is not open.

        A link that leads there already stays. There is no link if the client has named too many peers (see
        `DialBudget`): then it delivers the outputs itself.
        """
        self._sessions.require_open(session)  # nothing would ever close the link of a session that is forgotten
        session.allow_push_from(message.previous_peer, message.sequences)
        peer_id, session_id, client = message.next_peer, message.next_session_id, session.terms.peer_id
        if peer_id is None or session_id is None:
            session.close_push_link()
        elif session.push_link is None or not session.push_link.leads_to(peer_id, session_id):
            session.close_push_link()
            if (dial := self._dials.begin(client, peer_id, asyncio.get_running_loop().time())) is not None:
                session.push_link = PushLink(self._network, client, peer_id, session_id, dial)

    async def answer(self, peer_id: str, message: messages.PushRequest, payload: Bytes) -> None:
        """A step from the previous server. Its reply or refusal goes to the client, not to the server that pushed.

        But for what that server can only do out of malice: it changes nothing, and the client does not hear of it.
        Raises `UnknownSession` if that server may not push there, or not so many sequences; `WrongPosition` if the
        step's number is beyond all that may come.
        """
        step = message.step
        session = await self._sessions.find_for_push(peer_id, message.client, message.session_id, len(step.counts))
        session.require_near(step.step)
        handling = self._steps.run_step(session, step, payload, asked_by_client=False)
        reply, output = await self._replies.answer_or_refuse(handling, message, message.client, step.step)
        if reply is not None and session.client is not None:
            with suppress(PeerLost):  # a client that is away may ask again
                await self._replies.send(session.client, reply, output, session)
