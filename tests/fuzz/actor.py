"""One attacker in a sequence of messages: some sessions, and what it does to them, right and wrong in turns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import pack_adapters
from swarm.transport.p2p import Peer
from tests.fuzz.attackers import Talk, refusals, short
from tests.fuzz.kinds import Violation
from tests.fuzz.mutations import INTEGERS, integer, mutated
from tests.fuzz.session_model import BUSY, NO_FORMAT, SILENT, TOKENS, SessionModel, decode
from tests.fuzz.session_talk import SessionTalk
from tests.fuzz.targets import HIDDEN_SIZE, ServerTarget

MAX_SESSIONS = 4
LENGTHS = (1, 2, 8, 33, 64)
PUSHED_ROWS = 4
CLOSE = messages.CloseSession()


class Actor:
    """One attacker.

    Args:
        others: peers that may push for it.
        revision: of the model.
        outcomes: counts answers.

    """

    def __init__(
        self,
        peer: Peer,
        others: Sequence[Peer],
        servers: Sequence[ServerTarget],
        revision: str,
        random: random.Random,
        outcomes: Counter[str],
    ) -> None:
        self._peer = peer
        self._others = others
        self._servers = servers
        self._revision = revision
        self._random = random
        self._outcomes = outcomes
        self._talks: list[Talk] = []
        self._sessions: list[SessionTalk] = []
        self._left: list[SessionModel] = []

    @property
    def sent(self) -> int:
        """How many messages, without those that only ask whether all is answered."""
        return sum(talk.sent for talk in self._talks)

    async def act(self, messages: int) -> None:
        """Send about so many messages."""
        actions: dict[Callable[[SessionTalk], Awaitable[None]], int] = {
            self._step: 30,
            self._wrong_step: 22,
            self._same_again: 6,
            self._replay: 6,
            self._wrong_replay: 4,
            self._give_up: 4,
            self._push: 10,
            self._chain: 8,
            self._reopen: 5,
            self._neighbors: 4,
            self._without_session: 4,
            self._close: 5,
        }
        try:
            while self.sent < messages:
                self._sessions = [session for session in self._sessions if not session.talk.is_over]
                if not self._sessions or (len(self._sessions) < MAX_SESSIONS and self._random.random() < 0.1):
                    await self._open()
                    continue
                action = self._random.choices(list(actions), list(actions.values()))[0]
                await action(self._random.choice(self._sessions))
            for session in self._sessions:
                await session.compare(self._revision)
        finally:
            for session in self._sessions:
                if self._random.random() < 0.85:
                    await session.talk.say(CLOSE)
            for talk in self._talks:
                talk.close()

    async def _talk(self, peer: Peer, server: ServerTarget) -> Talk:
        talk = await Talk.open(peer, server, self._outcomes)
        self._talks.append(talk)
        return talk

    async def _open(self) -> None:
        chosen = self._random
        server = chosen.choice(self._servers)
        start = chosen.randint(server.start, server.end - 1)
        end = chosen.randint(start + 1, server.end)
        model = SessionModel(
            chosen.randbytes(16), server, start, end, chosen.choice(LENGTHS), sequences=chosen.choice((1, 1, 1, 2, 3))
        )
        talk = await self._talk(self._peer, server)
        message = model.opening(self._revision, wait_timeout_s=chosen.choice((0.0, 0.0, 0.05)))
        if chosen.random() < 0.35:
            await self._open_wrongly(talk, message)
            return
        if chosen.random() < 0.25:
            model.adapters = await self._put_adapter(talk, model)
            message = msgspec.structs.replace(message, adapters=model.adapters)
        if model.sequences == 1 and chosen.random() < 0.5 and (source := self._source(model)) is not None:
            length = chosen.randint(1, len(source.rows[0]))
            message = msgspec.structs.replace(message, prefix=messages.PrefixOf(source.session_id, length))
        await self._open_at(model, talk, message)

    def _source(self, model: SessionModel) -> SessionModel | None:
        """A session at the same server, open or closed. If its blocks are others, nothing of it may be taken."""
        found = [*self._left, *(session.model for session in self._sessions if session.model.is_certain)]
        found = [one for one in found if one.server is model.server and len(one.rows) == 1 and one.rows[0]]
        return self._random.choice(found) if found else None

    async def _put_adapter(self, talk: Talk, model: SessionModel) -> list[bytes] | None:
        """Digests of an adapter for the session, which is at the server now; None if that has no room for it."""
        weights = torch.Generator().manual_seed(self._random.getrandbits(32))
        rank = self._random.choice((1, 2, 8))
        down = torch.randn(rank, HIDDEN_SIZE, generator=weights) / 10
        up = torch.randn(HIDDEN_SIZE, rank, generator=weights) / 10
        part = BlockAdapterWeights(None, (LoraFactors("self_attn.q_proj", down, up),))
        specs, payload = pack_adapters([part], torch.float32)
        block = self._random.randrange(model.start, model.end)
        message = messages.PutAdapters(block, list(specs), "float32")
        if self._random.random() < 0.3:
            await talk.ask(mutated(self._random, message), payload)
        if talk.is_over:
            return None
        answers = await talk.ask(message, payload)
        if not any(isinstance(answer, messages.AdaptersStored) for answer, _ in answers):
            if not any(refusal.code in BUSY for refusal in refusals(answers)):
                raise Violation(f"{talk.server.name} refused a right adapter: {answers}")
            return None
        return [specs[0].digest if one == block else b"" for one in range(model.start, model.end)]

    async def _open_wrongly(self, talk: Talk, message: messages.OpenSession) -> None:
        """An opening that may be right by chance; then the session is closed again."""
        wrong = mutated(self._random, msgspec.structs.replace(message, wait_timeout_s=0.0))
        decoded = decode(wrong)
        if decoded is not None and decoded.wait_timeout_s > 0.1:
            wrong = msgspec.structs.replace(decoded, wait_timeout_s=0.1)
        await talk.ask(wrong)
        if decoded is None and not talk.is_over:
            raise Violation(f"{talk.server.name} took {wrong} for a message")
        await talk.say(CLOSE)
        talk.close()

    async def _open_at(self, model: SessionModel, talk: Talk, message: messages.OpenSession) -> None:
        if talk.is_over:
            return
        answers = await talk.ask(message)
        opened = [answer for answer, _ in answers if isinstance(answer, messages.SessionOpened)]
        if not opened:
            is_forgotten = model.adapters is not None and [one.code for one in refusals(answers)] == ["unknown_adapter"]
            if not is_forgotten and not any(refusal.code in BUSY for refusal in refusals(answers)):
                raise Violation(f"{talk.server.name} refused a right opening: {answers}")
            talk.close()
            return
        if not model.is_known:
            model.forget()
        if opened[0].next_step != model.next_step:
            if opened[0].next_step:
                raise Violation(f"{talk.server.name} expects step {opened[0].next_step}, not {model.next_step}")
            model.forget()  # it has closed the session meanwhile, because others needed the room
        if message.prefix is not None and opened[0].begun:
            self._begin(model, message.prefix, opened[0].begun)
        model.is_known = True
        self._sessions.append(SessionTalk(model, talk))

    def _begin(self, model: SessionModel, prefix: messages.PrefixOf, begun: int) -> None:
        """The session has begun with another one's tokens; what it answers from now on shows whether with the right
        ones."""
        known = [*self._left, *(session.model for session in self._sessions)]
        source = next(one for one in known if one.session_id == prefix.session_id)
        are_alike = (source.start, source.end, source.adapters) == (model.start, model.end, model.adapters)
        if not are_alike or begun > prefix.length:
            raise Violation(f"{model.server.name} began a session with {begun} tokens of another one: {prefix}")
        model.rows = [source.rows[0][:begun]]

    async def _step(self, session: SessionTalk) -> None:
        model = session.model
        message, payload = model.right_step(self._random)
        await session.step(message, payload)

    async def _wrong_step(self, session: SessionTalk) -> None:
        model = session.model
        message, payload = model.right_step(self._random)
        if self._random.random() < 0.2:
            payload = self._wrong_payload(payload)
        else:
            message = mutated(self._random, message)
        await session.step(message, payload)

    def _wrong_payload(self, payload: bytes) -> bytes:
        match self._random.randrange(4):
            case 0:
                return payload[: self._random.randrange(len(payload) + 1)]
            case 1:
                return payload + self._random.choice((b"\0", payload, bytes(4096)))
        values = np.frombuffer(payload, np.float32).copy()
        values[self._random.randrange(len(values))] = self._random.choice((np.nan, np.inf, -np.inf, 3.4e38, -0.0))
        return values.tobytes()

    async def _same_again(self, session: SessionTalk) -> None:
        if session.last is not None:
            await session.step(*session.last)

    async def _replay(self, session: SessionTalk) -> None:
        model = session.model
        await session.replay(*model.right_replay(self._random))

    async def _wrong_replay(self, session: SessionTalk) -> None:
        model = session.model
        message, payload = model.right_replay(self._random)
        await session.replay(mutated(self._random, message), payload)

    async def _give_up(self, session: SessionTalk) -> None:
        model, talk = session.model, session.talk
        first = self._random.choice((model.next_step, max(0, model.next_step - 1), integer(self._random)))
        near = min(first + self._random.choice((0, 1, 2)), INTEGERS[-1])
        end = near if self._random.random() < 0.8 else integer(self._random)
        message = messages.GiveUp(first, end)
        await session.tell(message)
        if not talk.is_over:
            model.note_given_up(first, end)

    async def _push(self, session: SessionTalk) -> None:
        """Another peer pushes a step, which it may or may not do; the answer comes to this one."""
        model, talk = session.model, session.talk
        pusher = self._random.choice(self._others)
        is_allowed = self._random.random() < 0.9
        message, payload = model.right_step(self._random)
        if self._random.random() < 0.4:
            message = mutated(self._random, message)
        allowed = messages.SetNeighbors(pusher.peer_id if is_allowed else None, None, None, PUSHED_ROWS)
        await session.tell(allowed)
        expected = model.expect_push(message, payload) if is_allowed else SILENT
        rows = decode(messages.PushRequest("", model.session_id, message))
        if rows is not None and len(rows.step.counts) > max(PUSHED_ROWS, model.sequences):
            expected = SILENT
        pushing = await self._talk(pusher, model.server)
        try:
            await pushing.ask(messages.PushRequest(self._peer.peer_id, model.session_id, message), payload)
        finally:
            pushing.close()
        answers = await talk.ask(messages.SetNeighbors(None, None, None))
        if session.judge(message, expected, answers, messages.StepReply) is not None:
            model.note_step(message, payload)
            session.last = message, payload

    async def _chain(self, session: SessionTalk) -> None:
        """Steps of a session that its server pushes into another one, at the same or at another server."""
        model, talk = session.model, session.talk
        others = [one for one in self._sessions if one is not session]
        if not others or not model.is_certain:
            return
        behind = self._random.choice(others)
        counts = [len(row) for row in model.rows]
        if sum(counts):  # as a client does it that replaces a server
            payload = b"".join(token for row in model.rows for token in row)
            starts = [0] * len(counts)
            replay = messages.ReplayRequest(
                model.next_step, starts, counts, NO_FORMAT, "float32", None, False, model.epoch
            )
            await behind.replay(replay, payload)
        await behind.tell(messages.SetNeighbors(model.server.peer_id, None, None, PUSHED_ROWS))
        await session.tell(messages.SetNeighbors(None, behind.model.server.peer_id, behind.model.session_id))
        for _ in range(self._random.randint(1, 3)):
            message, payload = model.right_step(self._random)
            if talk.is_over or behind.talk.is_over:
                return
            answered = await session.step(message, payload)
            if answered is None or not answered[0].pushed:
                break
            expected = behind.model.expect_push(message, answered[1])
            if expected == SILENT:
                break
            heard = await behind.talk.hear()
            answers = [heard] if heard is not None else []
            if behind.judge(message, expected, answers, messages.StepReply) is not None:
                behind.model.note_step(message, answered[1])
                behind.last = message, answered[1]
        for one in (session, behind):
            if not one.talk.is_over:
                await one.tell(messages.SetNeighbors(None, None, None))

    async def _reopen(self, session: SessionTalk) -> None:
        """Go on with a session on another stream; the one before may still be there."""
        model, talk = session.model, session.talk
        self._sessions.remove(session)
        if self._random.random() < 0.7:
            talk.close()
        fresh = await self._talk(self._peer, model.server)
        await self._open_at(model, fresh, model.opening(self._revision))
        if self._random.random() < 0.5:
            talk.close()

    async def _neighbors(self, session: SessionTalk) -> None:
        """Let the server push to sessions of this attacker, to attackers, and to nobody; then compute a step."""
        talk = session.talk
        others = [one.model for one in self._sessions if one is not session]
        target = self._random.choice(others) if others and self._random.random() < 0.6 else None
        peer_id = target.server.peer_id if target is not None else self._random.choice(self._others).peer_id
        session_id = target.session_id if target is not None else self._random.randbytes(16)
        message: Any = messages.SetNeighbors(None, peer_id, session_id)
        if self._random.random() < 0.3:
            message = mutated(self._random, message)
        await session.tell(message)
        if not talk.is_over:
            await self._step(session)
            await session.tell(messages.SetNeighbors(None, None, None))

    async def _without_session(self, session: SessionTalk) -> None:
        """A forward, a backward, a probe or adapters, on the same stream."""
        model, talk = session.model, session.talk
        server, tokens = model.server, self._random.choice((1, 2, 7))
        payload = b"".join(self._random.choices(TOKENS, k=tokens))
        span = self._revision, server.start, server.end
        forward = messages.ForwardRequest(*span, [tokens], NO_FORMAT, "float32", NO_FORMAT)
        backward = messages.BackwardRequest(*span, [tokens], NO_FORMAT, "float32", NO_FORMAT)
        probe = messages.ProbeRequest(self._random.choice((0, 1, 1 << 20)))
        message, sent, kind = self._random.choice(
            (
                (forward, payload, messages.ForwardReply),
                (backward, payload * 2, messages.BackwardReply),
                (probe, b"", messages.ProbeReply),
            )
        )
        is_right = self._random.random() < 0.5
        if not is_right:
            message = mutated(self._random, message)
        answers = await talk.ask(message, sent)
        if is_right and not talk.is_over and not refusals(answers) and [type(one) for one, _ in answers] != [kind]:
            raise Violation(f"{talk.server.name} answered {short(message)} with {answers}")
        if decode(message) is None and not talk.is_over:
            raise Violation(f"{talk.server.name} took {short(message)} for a message")

    async def _close(self, session: SessionTalk) -> None:
        """Close the session; whatever is said on the stream afterwards is not heard."""
        model, talk = session.model, session.talk
        keep = len(model.rows[0]) if len(model.rows) == 1 else self._random.choice((0, 5, 2**31 - 1))
        if keep and len(model.rows) == 1 and model.is_certain:
            self._left.append(replace(model, rows=[list(model.rows[0])]))
        await talk.say(messages.CloseSession(keep))
        await talk.ask(*model.right_step(self._random))
        if not talk.is_over:
            raise Violation(f"{talk.server.name} goes on after a session was closed")
        model.forget()
