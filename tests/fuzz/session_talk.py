"""A session of an attacker: its stream, the model of what the server has to know of it, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from swarm.protocol import messages
from swarm.protocol.input_checksum import input_checksum
from tests.fuzz.attackers import Answer, Talk, refusals, short
from tests.fuzz.kinds import Violation
from tests.fuzz.session_model import (
    ANSWERED,
    BUSY,
    CLOSED,
    NO_FORMAT,
    REFUSED,
    SILENT,
    TOKENS,
    UNSURE,
    SessionModel,
    decode,
    tokens_of,
)

TOLERANCE = 2e-3
"""Between outputs of a session and of a forward, relative to the largest."""


class SessionTalk:
    """One session on one stream.

    Attributes:
        last: the last step that was computed, and its payload.
    """

    def __init__(self, model: SessionModel, talk: Talk) -> None:
        self.model = model
        self.talk = talk
        self.last: tuple[Any, bytes] | None = None

    async def step(self, message: Any, payload: bytes) -> tuple[messages.StepReply, bytes] | None:
        """Send a step; the reply and the outputs, None if there are none."""
        expected = self.model.expect_step(message, payload)
        answers = await self.talk.ask(message, payload)
        reply = self.judge(message, expected, answers, messages.StepReply)
        if reply is None:
            return None
        answer, output = reply
        if answer.input_checksum != input_checksum(decode(message), payload):
            raise Violation(f"{self.talk.server.name} computed something else than {message}")
        self.model.note_step(message, payload)
        self.last = message, payload
        return answer, output

    async def replay(self, message: Any, payload: bytes) -> None:
        """Send a replay."""
        expected = self.model.expect_replay(message, payload)
        answers = await self.talk.ask(message, payload)
        if self.judge(message, expected, answers, messages.ReplayReply) is not None:
            self.model.note_replay(message, payload)

    async def tell(self, message: Any) -> None:
        """Send a message that is not answered. Nothing is sent if the server has ended the stream before."""
        if self.talk.is_over:
            return
        answers = await self.talk.ask(message)
        if (decode(message) is None) != self.talk.is_over and not refusals(answers):
            raise Violation(
                f"{self.talk.server.name} {'ended' if self.talk.is_over else 'continued'} the stream after "
                f"{short(message)}"
            )

    async def compare(self, revision: str) -> None:
        """What the session has cached gives the same outputs as its tokens do without a session."""
        rows = [row for row in self.model.rows if row]
        if not self.model.is_certain or self.talk.is_over or not rows or len(rows) < len(self.model.rows):
            return
        if any(len(row) >= self.model.max_length for row in rows):
            return
        number = max(self.model.next_step, self.model.given_up.stop)
        if number > 2**31 - 3:
            return
        token = TOKENS[5]
        counts = [1] * len(rows)
        step = messages.StepRequest(number, [len(row) for row in rows], counts, NO_FORMAT, "float32", epoch=number)
        answered = await self.step(step, token * len(rows))
        if answered is None:
            return
        whole = [len(row) + 1 for row in rows]
        payload = b"".join(b"".join(row) + token for row in rows)
        forward = messages.ForwardRequest(
            revision,
            self.model.start,
            self.model.end,
            whole,
            NO_FORMAT,
            "float32",
            NO_FORMAT,
            None,
            self.model.adapters,
        )
        answers = await self.talk.ask(forward, payload)
        replies = [body for answer, body in answers if isinstance(answer, messages.ForwardReply)]
        if not replies:
            return
        ends = np.cumsum(whole) - 1
        expected = np.array([np.frombuffer(one, np.float32) for one in tokens_of(replies[0])])[ends]
        found = np.array([np.frombuffer(one, np.float32) for one in tokens_of(answered[1])])
        difference = float(np.abs(expected - found).max() / np.abs(expected).max())
        self.talk.outcomes["caches compared"] += 1
        if not difference <= TOLERANCE:
            name = self.model.session_id.hex()
            raise Violation(f"{self.talk.server.name}: the cache of {name} is wrong by {difference:.2g}")

    def judge(
        self, message: Any, expected: str, answers: Sequence[Answer], kind: type[Any]
    ) -> tuple[Any, bytes] | None:
        """The answer to a message of a session. Raises `Violation` if it is not what was expected."""
        if any(refusal.code in ("cache_reclaimed", "unknown_session") for refusal in refusals(answers)):
            self.model.forget()
            self.talk.is_over = True
            self.talk.close()
            return None
        refused = [one for one in refusals(answers) if one.code not in BUSY]
        is_busy = len(refused) < len(refusals(answers))
        replies = [(answer, payload) for answer, payload in answers if isinstance(answer, kind)]
        found = ANSWERED if replies else REFUSED if refused else CLOSED if self.talk.is_over else SILENT
        if expected == CLOSED and self.talk.is_over:  # after a refusal, if that was not lost with the stream
            found = CLOSED
        is_right = found == expected or (expected == UNSURE and found in (ANSWERED, REFUSED))
        if not is_right and not (is_busy and not replies):
            raise Violation(
                f"{self.talk.server.name}: {expected} was right and {found} is what happened to {short(message)} of "
                f"{self.model}; "
                f"it said {[short(answer) for answer, _ in answers]}"
            )
        return replies[0] if replies else None
