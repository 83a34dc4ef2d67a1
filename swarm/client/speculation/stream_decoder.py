"""The loop that sends guesses behind the newest token before it is verified, in place of transformers' own.

The newest token that stands goes off, and guesses of what follows it go off behind, in steps of one or a few tokens,
for as long as they are worth it (`guess_policy`). Answers come in this order. Each says what its token's successor is:
if that was guessed, the next answer counts, too, and is on its way already. If not, everything behind is given up, and
the right token goes off in a new epoch. So a wrong guess costs one way through the servers, and right ones cost nothing
but what the slowest server needs for them (PipeInfer, 2024; Leviathan et al., 2023, for what makes it lossless).

Tokens are drawn with random numbers that belong to their position. A draft draws with those of the position for which
it guesses, so the more alike its probabilities are, the more often it guesses right; and what stands is what the same
random numbers give without guesses.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swarm.client.chain.chain import MAX_STEPS_UNDER_WAY
from swarm.client.early_exit.token_output import TokenOutput
from swarm.client.routes.events import GuessVerified
from swarm.client.sampling import PositionNoise, Sampling
from swarm.client.session import InferenceSession, StepUnderWay
from swarm.client.speculation.drafts import Context, Draft, Guess
from swarm.client.speculation.guess_policy import Acceptance, GuessPolicy

MAX_GROUP = 8
"""Most guesses of a step."""

STEPS_PER_SIZE = 8
"""The more steps are under way, the more tokens has the next one: one more for each so many."""


SPARE = 1024
"""Room behind a text for tokens to come: twice what can be under way at least, so that it is seldom copied."""


class TextForward(Protocol):
    """The two halves of the model's forward, for one text."""

    def send(self, tokens_1T: torch.Tensor, count: int, waits: bool) -> StepUnderWay:
        """Begin the step of the last `count` tokens; `waits` for what has been asked for, not just guessed."""

    def begins_again(self, length: int) -> bool:
        """Whether a text of so many tokens is computed anew, because its rotary frequencies change there."""

    def compute(self, tokens_1T: torch.Tensor) -> torch.Tensor:
        """The logits `[1, V]` behind a text, while no step is under way."""

    def logits(self, hidden_1NH: torch.Tensor) -> torch.Tensor:
        """The logits `[N, V]` of hidden states behind the last block."""


@dataclass(eq=False)
class _Flight:
    """A step under way.

    Attributes:
        sent_at: when it went off, if no other was under way.
    """

    step: StepUnderWay
    tokens: int
    sent_at: float | None


@dataclass(frozen=True, slots=True)
class _Guessed:
    """A guess behind what stands.

    Attributes:
        draft: number of the draft.
        chance: that it stands if those before do, as was thought when it was made.
    """

    guess: Guess
    draft: int
    chance: float


class StreamDecoder:
    """Generates the tokens of one text.

    Args:
        drafts: in the order in which they are asked.
        session: has computed the prompt.
        forward: of the model.
        sampling: how tokens are chosen; `process` is for those that are verified.
        guess_process: the same for guesses.
        output: is handed the tokens, in order.
        blocks: of the model.
        overhead: see `GuessPolicy`.
        memory: how often the guesses of drafts stood in earlier texts, by name; is kept up to date.
        room: how many tokens a text of so many tokens may have with guesses behind.
        max_group: most guesses of a step.
        clock: seconds.
    """

    def __init__(
        self,
        drafts: Sequence[Draft],
        session: InferenceSession,
        forward: TextForward,
        sampling: Sampling,
        guess_process: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        output: TokenOutput,
        blocks: int,
        overhead: float,
        memory: dict[str, Acceptance],
        room: Callable[[int], int],
        max_group: int = MAX_GROUP,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafts, self._session, self._forward = drafts, session, forward
        self._sampling, self._guess_process, self._output = sampling, guess_process, output
        self._blocks, self._room, self._max_group, self._clock = blocks, room, max_group, clock
        acceptance = [Acceptance(memory.get(draft.name)) for draft in drafts]
        self._policy = GuessPolicy(acceptance, overhead)
        self._memory = memory
        self._noise = PositionNoise()
        self._flights: deque[_Flight] = deque()
        self._guesses: deque[_Guessed] = deque()
        self._ends = set(sampling.ends.flatten().tolist()) if sampling.ends is not None else set()
        self._text_1T = torch.empty(1, 0, dtype=torch.long)
        """What stands, guesses behind, and room for more."""
        self._certain = self._sent = self._padding = 0
        self._context: list[int] = []
        self._finished = False
        self._vocabulary = 0
        self._tries = self._was_plain = False
        self._settled_at = self._waited = 0.0

    def generate(
        self, prompt_1T: torch.Tensor, mask_1T: torch.Tensor | None, logits_1V: torch.Tensor, new: int
    ) -> torch.Tensor:
        """Continue a text until it is finished; the whole text.

        Args:
            prompt_1T: computed in the session already.
            mask_1T: its attention mask; None if no slot is padding.
            logits_1V: of its last token.
            new: how many of its tokens the session has computed for that.
        """
        length = self._certain = self._sent = prompt_1T.shape[1]
        self._text_1T = torch.nn.functional.pad(prompt_1T, (0, SPARE))
        real_T = prompt_1T[0] if mask_1T is None else prompt_1T[0][mask_1T[0].bool()]
        self._context = real_T.tolist()
        self._padding = length - len(self._context)
        self._vocabulary = logits_1V.shape[-1]
        self._policy.on_prompt(new, self._session.timings)
        self._settled_at = self._clock()
        self._stand(self._chosen(logits_1V))
        try:
            while not self._finished:
                if self._is_answered():
                    self._settle(self._flights.popleft())
                elif not self._flights and self._forward.begins_again(self._certain - self._padding):
                    self._stand(self._chosen(self._forward.compute(self._text_1T[:, : self._certain])))
                    self._sent = self._certain - 1
                elif not self._send():
                    began = self._clock()
                    self._session.wait(self._is_answered)
                    self._waited += self._clock() - began
        finally:
            if self._flights:
                self._session.give_up(self._flights[0].step)
            self._noise.end(self._certain)
            for draft, acceptance in zip(self._drafts, self._policy.acceptance, strict=True):
                self._memory[draft.name] = acceptance
        return self._text_1T[:, : self._certain]

    def _is_answered(self) -> bool:
        """Whether the oldest step is."""
        return bool(self._flights) and self._session.has_outputs(self._flights[0].step, self._blocks)

    @property
    def _end(self) -> int:
        """Where the text ends with its guesses."""
        return self._certain + len(self._guesses)

    def _send(self) -> bool:
        """Send the newest token that stands, or guess further and send guesses; False if all that has to wait."""
        if self._sent < self._certain:
            if self._max_group > 1:
                self._guess(self._max_group, instantly=True)
            self._begin_step(waits=True)
            return True
        began, end, under_way = self._clock(), self._end, len(self._flights)
        may_send = under_way < min(MAX_STEPS_UNDER_WAY, self._policy.useful_steps)
        size = min(1 + under_way // STEPS_PER_SIZE if may_send else self._max_group, self._max_group)
        self._guess(size - (end - self._sent))
        guessed = self._end > end
        if may_send and self._end > self._sent and (not guessed or self._end - self._sent >= size):
            self._begin_step(waits=False)
            guessed = True
        if self._end > end:
            self._policy.on_proposed(self._clock() - began, self._end - end)
        return guessed

    def _begin_step(self, waits: bool) -> None:
        """Send off what was not sent yet."""
        alone, count = not self._flights, self._end - self._sent
        began = self._clock()
        step = self._forward.send(self._text_1T[:, : self._end], count, waits)
        self._flights.append(_Flight(step, count, began if alone else None))
        self._sent = self._end

    def _guess(self, most: int, instantly: bool = False) -> None:
        """Add at most so many guesses that are worth sending; one, if they take time."""
        if not self._policy.pace.guesses:
            return
        chance = math.prod(one.chance for one in self._guesses)
        most = min(most, self._room(self._certain) - self._end)
        if most <= 0 or (self._guesses and self._guesses[-1].guess.token in self._ends):
            return
        tried, self._tries = self._tries and not self._guesses, False
        least = 0.0 if tried else self._policy.least_chance
        for one in self._proposed(chance, least, 1 if tried else most, instantly):
            self._text_1T[0, self._end] = one.guess.token
            self._context.append(one.guess.token)
            self._guesses.append(one)

    def _proposed(self, chance: float, least: float, most: int, instantly: bool) -> list[_Guessed]:
        """What the first draft proposes whose guess is worth it; as far as it is, and at most `most`.

        Args:
            chance: that all before stand.
            least: that a guess has to have.
            instantly: ask only drafts that need no time.
        """
        context = Context(self._context, self._certain - self._padding)
        usual, best = max((one.mean for one in self._policy.acceptance), default=0.0), list[_Guessed]()
        for number, draft in enumerate(self._drafts):
            acceptance, is_instant = self._policy.acceptance[number], self._policy.is_instant(number)
            if (instantly and not is_instant) or chance * acceptance.mean < least:
                continue
            began, along, found = self._clock(), chance, list[_Guessed]()
            guesses = draft.propose(context, most if is_instant else 1, self._choose_guess)
            for guess in guesses:
                one = acceptance.chance(guess.probability)
                along *= one
                if along < least or guess.token >= self._vocabulary:
                    break
                found.append(_Guessed(guess, number, one))
                if guess.token in self._ends:
                    break
            self._policy.on_asked(number, self._clock() - began, len(guesses))
            if found and (not best or found[0].chance > best[0].chance):
                best = found
            if best and best[0].chance >= usual:
                break
        return best

    def _choose_guess(self, behind: Sequence[int], logits_V: torch.Tensor) -> int:
        """What a model with these logits would write behind the guesses and the tokens given."""
        end = self._end + len(behind)
        self._text_1T[0, self._end : end] = torch.tensor(behind, dtype=torch.long)
        scores_1V = logits_V.new_full((1, self._vocabulary), -torch.inf, dtype=torch.float32)
        known = min(len(logits_V), self._vocabulary)
        scores_1V[0, :known] = logits_V[:known]
        return self._pick(self._guess_process(self._text_1T[:, :end], scores_1V.to(self._text_1T.device)), end)

    def _chosen(self, logits_1V: torch.Tensor) -> int:
        """The token behind what stands."""
        token = self._pick(self._sampling.process(self._text_1T[:, : self._certain], logits_1V), self._certain)
        self._noise.forget(self._certain)
        return token

    def _pick(self, scores_1V: torch.Tensor, position: int) -> int:
        if not self._sampling.sample:
            return int(scores_1V.argmax(-1))
        return int(self._noise.draw(scores_1V.softmax(-1), position))

    def _settle(self, flight: _Flight) -> None:
        """The oldest step is answered: each of its tokens that stands has a successor that stands."""
        hidden_1NH, guessing = self._session.outputs(flight.step, self._blocks), bool(self._guesses)
        self._policy.on_answer(flight.tokens, self._session.timings)
        self._session.settle(flight.step)
        logits_NV, stood = self._forward.logits(hidden_1NH), 0
        for number in range(flight.tokens):
            token, guessed = self._chosen(logits_NV[number : number + 1]), self._guesses[0] if self._guesses else None
            right = guessed is not None and guessed.guess.token == token
            if guessed is not None:
                self._policy.acceptance[guessed.draft].on_verified(guessed.guess.probability, right)
                self._session.report(GuessVerified(self._drafts[guessed.draft].name, right))
            else:
                self._tries = self._policy.may_try()
            if not right:
                self._give_up_guesses(flight.step.before + number + 1)
            self._stand(token, was_guessed=right)
            stood += 1
            if self._finished:
                self._give_up_guesses(flight.step.before + number + 1)
            if self._finished or not right:
                break
        first = self._certain - self._padding - stood - 1
        for draft in self._drafts:
            draft.observe(first, hidden_1NH[0, :stood])
        now = self._clock()
        if flight.sent_at is not None:
            self._policy.pace.on_round(now - flight.sent_at)
        if guessing or self._was_plain:  # servers may still be busy with guesses that were given up
            self._policy.pace.on_tokens(stood, now - self._settled_at, guessing)
        self._was_plain = not guessing and not self._policy.pace.guesses
        self._policy.on_tokens(stood, now - self._settled_at, self._waited)
        self._settled_at, self._waited = now, 0.0

    def _give_up_guesses(self, position: int) -> None:
        """Drop all guesses, and what servers have computed behind this position of the session."""
        if self._flights:
            self._session.give_up(self._flights[0].step)
            self._flights.clear()
        if self._session.position > position:
            self._session.position = position
        del self._context[len(self._context) - len(self._guesses) :]
        self._guesses.clear()
        self._sent = self._certain

    def _stand(self, token: int, was_guessed: bool = False) -> None:
        """The next token is certain."""
        if self._text_1T.shape[1] < self._end + SPARE // 2:
            self._text_1T = torch.nn.functional.pad(self._text_1T, (0, SPARE))
        if was_guessed:
            self._guesses.popleft()
        else:
            self._text_1T[0, self._certain] = token
            self._context.append(token)
        self._certain += 1
        text_1T = self._text_1T[:, : self._certain]
        self._finished = bool(self._sampling.is_finished(text_1T).all())
        self._output.put(text_1T[:, -1])
