"""The loop that lets tokens leave between servers, in place of transformers' own.

While the newest token travels through the servers, this client receives a copy of each server's outputs and reads it
through the model's final norm and head. If the token is sure, the client chooses its successor and sends that off at
once. The servers behind continue with the earlier token, so their caches become those of the full model. The last
server's answer comes later. With `verify`, it decides whether the successor stands; if not, everything that was sent
after it is given up. In greedy texts, a later server's copy that is sure of another successor replaces the guess.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swarm.client.chain.chain import MAX_STEPS_UNDER_WAY
from swarm.client.early_exit.exit_terms import terms_for
from swarm.client.early_exit.options import EarlyExit
from swarm.client.early_exit.token_output import TokenOutput
from swarm.client.routes.events import ExitTaken, ExitVerified
from swarm.client.sampling import PositionNoise, Sampling
from swarm.client.session import InferenceSession, StepUnderWay
from swarm.client.speculation.guess_policy import averaged
from swarm.models.exits.confidence import decayed_threshold, softmax_response, state_similarity
from swarm.models.exits.trained_exits import TrainedExits
from swarm.protocol.messages import ExitTerms

MIN_GAIN = 3.0
"""Tokens are looked at if the last server's answer comes at least this many times later than a look takes."""

KEPT_SHARE = 0.8
"""Weight of the past in the averages of these times."""

TRIED_EVERY = 16
"""Where looking does not pay, one token in so many is looked at, to see whether that has changed."""


class ForwardParts(Protocol):
    """The two halves of the model's forward: before the blocks, and behind them."""

    def send(self, tokens_RT: torch.Tensor, exits: ExitTerms | None, exit_block: int | None) -> StepUnderWay:
        """Begin the step of the last token of each sequence.

        It may leave inside a span as `exits` say, and in front of `exit_block` or behind.
        """

    def logits(self, hidden_R1H: torch.Tensor) -> torch.Tensor:
        """The logits `[R, V]` of hidden states behind the last block, or as if they were."""


@dataclass
class _Guess:
    """The successor of a token that has left early.

    Attributes:
        tokens_R: chosen.
        open_R: sequences that have not ended with them.
        block: in front of which the token left.
    """

    tokens_R: torch.Tensor
    open_R: torch.Tensor
    block: int


@dataclass(eq=False)
class _Flight:
    """A step under way: one token of each sequence.

    Attributes:
        tokens_RT: the sequences, this token included.
        open_R: sequences that have not ended.
        guess: of the next token, once this one has left.
        looks: whether it is looked at before the last server answers.
        seen: block in front of which it was looked at last.
        seen_at: when it could be looked at first.
        sure_R: sequences that were sure there.
        last_RH: hidden states where it was looked at last.
    """

    step: StepUnderWay
    tokens_RT: torch.Tensor
    open_R: torch.Tensor
    looks: bool
    guess: _Guess | None = None
    seen: int = 0
    seen_at: float | None = None
    sure_R: torch.Tensor = field(default_factory=lambda: torch.tensor(False))
    last_RH: torch.Tensor | None = None


class ExitDecoder:
    """Generates the tokens of one `generate` call.

    Args:
        options: when tokens leave.
        exits: lenses and classifiers, for the boundaries that have some.
        session: has computed the prompt.
        model: its forward.
        sampling: how tokens are chosen.
        output: is handed the tokens, in order.
    """

    def __init__(
        self,
        options: EarlyExit,
        exits: TrainedExits,
        session: InferenceSession,
        model: ForwardParts,
        sampling: Sampling,
        output: TokenOutput,
    ) -> None:
        self._options, self._session = options, session
        self._model, self._sampling, self._output = model, sampling, output
        self._blocks = exits.base.blocks
        self._reader = HiddenReader(options, exits, model.logits)
        self._flights: deque[_Flight] = deque()
        self._looks = LookMeter()
        self._noise = PositionNoise()
        self._tokens_RT = torch.empty(0, 0, dtype=torch.long)
        self._open_R = torch.empty(0, dtype=torch.bool)
        self._prompt_length = 0

    def generate(self, prompt_RT: torch.Tensor, logits_RV: torch.Tensor) -> torch.Tensor:
        """Continue sequences until all are finished; the whole sequences.

        Args:
            prompt_RT: computed in the session already.
            logits_RV: of its last token.
        """
        self._tokens_RT, self._prompt_length = prompt_RT, prompt_RT.shape[1]
        self._open_R = torch.ones(len(prompt_RT), dtype=torch.bool, device=prompt_RT.device)
        self._add(self._chosen(prompt_RT, logits_RV))
        try:
            while bool(self._open_R.any()):
                newest = self._flights[-1] if self._flights else None
                if newest is None:
                    self._send(self._tokens_RT, self._open_R)
                elif newest.guess is not None and self._may_follow(newest, newest.guess):
                    self._send(_extended(newest.tokens_RT, newest.guess.tokens_R), newest.guess.open_R)
                else:
                    self._wait(newest)
            while self._flights and not self._options.verify:
                self._wait(self._flights[-1])
        finally:
            self._output.keep_provisional(0)
            if self._flights:
                self._session.give_up(self._flights[0].step)
            self._noise.end(self._tokens_RT.shape[1])
        return self._tokens_RT

    def _send(self, tokens_RT: torch.Tensor, open_R: torch.Tensor) -> None:
        session, place = self._session, self._place(tokens_RT)
        exits = terms_for(self._options, session.route, self._blocks, *place, session.warn_once)
        looks = not self._options.verify or self._looks.is_worth_looking()
        exit_block = self._options.first_exit(self._session.boundaries) if looks else None
        step = self._model.send(tokens_RT, exits, exit_block)
        self._flights.append(_Flight(step, tokens_RT, open_R, looks))

    def _may_follow(self, newest: _Flight, guess: _Guess) -> bool:
        """Whether a token that left may send its successor off."""
        length = newest.tokens_RT.shape[1] + 1
        room = len(self._flights) < MAX_STEPS_UNDER_WAY and length < self._sampling.max_length
        return room and bool(guess.open_R.any())

    def _wait(self, newest: _Flight) -> None:
        """Wait until the last server has answered the oldest token, or until one under way can be looked at."""
        oldest, boundaries = self._flights[0], self._options.looked_at(self._session.boundaries)

        def is_answered() -> bool:
            return self._session.has_outputs(oldest.step, self._blocks)

        if not self._options.verify:
            # Which token stands must not depend on what happens to come first: each boundary, then the answer.
            unseen = [block for block in boundaries if block > newest.seen] if newest.guess is None else []
            self._session.wait(lambda: bool(self._come(newest, unseen[:1])) if unseen else is_answered())
            if come := self._come(newest, unseen[:1]):
                self._look_at(newest, come[0])
            elif is_answered():
                self._settle(self._flights.popleft())
            return
        watched = [one for one in self._flights if one.looks]
        self._session.wait(lambda: is_answered() or any(self._come(one, boundaries) for one in watched))
        if is_answered():
            self._settle(self._flights.popleft())
            return
        for one in watched:
            if come := self._come(one, boundaries):
                self._look_at(one, come[-1])
                return

    def _come(self, flight: _Flight, blocks: Sequence[int]) -> list[int]:
        """Those of the blocks in front of which a token can be looked at now, for the first time."""
        return [block for block in blocks if block > flight.seen and self._session.has_outputs(flight.step, block)]

    def _look_at(self, flight: _Flight, block: int) -> None:
        """Let a token leave in front of `block` if it is sure there; if it has left before, check its guess."""
        began = time.perf_counter()
        if flight.seen_at is None:
            flight.seen_at = began
        self._look(flight, block)
        self._looks.on_look(time.perf_counter() - began)

    def _look(self, flight: _Flight, block: int) -> None:
        flight.seen = block
        hidden_R1H, left_R = self._session.outputs(flight.step, block), self._session.left(flight.step, block)
        before_RH = flight.last_RH if flight.last_RH is not None else flight.step.hidden[:, -1]
        flight.last_RH = hidden_R1H[:, -1]
        sure_R = torch.tensor([bool(one) for one in left_R], device=hidden_R1H.device)
        threshold, logits_RV = self._threshold(flight, block), None
        if threshold is not None and not bool(sure_R.all()):
            confidence_R, logits_RV = self._reader.confidence(block, before_RH, hidden_R1H)
            sure_R = sure_R | (confidence_R > threshold)
        if flight.guess is None:
            sure_R = flight.sure_R = flight.sure_R | sure_R
        if not bool((sure_R | ~flight.open_R).all()):
            return
        blocks_R = [one or block for one in left_R]
        if logits_RV is None or any(left_R):
            logits_RV = self._reader.logits(hidden_R1H, blocks_R)
        tokens_R = self._padded(self._chosen(flight.tokens_RT, logits_RV), flight.open_R)
        if flight.guess is not None:
            if torch.equal(tokens_R, flight.guess.tokens_R):
                return
            self._give_up_behind(flight)
        self._report_exits(flight, blocks_R)
        if self._options.verify:
            open_R = self._still_open(tokens_R, flight.open_R)
            self._output.put_provisional(tokens_R)
        else:
            self._add(tokens_R)
            open_R = self._open_R  # certain: stopping criteria have seen the tokens
        flight.guess = _Guess(tokens_R, open_R, block)

    def _threshold(self, flight: _Flight, block: int) -> float | None:
        """The threshold for a token in front of `block`; None if it may not leave there."""
        threshold = self._options.threshold_at(block)
        if threshold is None:
            return None
        return decayed_threshold(threshold, self._options.decay, *self._place(flight.tokens_RT))

    def _place(self, tokens_RT: torch.Tensor) -> tuple[int, int]:
        """The position of the newest token among those that are generated, and how many will be at most."""
        return tokens_RT.shape[1] - self._prompt_length, self._sampling.max_length - self._prompt_length

    def _report_exits(self, flight: _Flight, blocks_R: Sequence[int]) -> None:
        """Tell the listeners in front of which blocks the open sequences have left."""
        left = [block for block, is_open in zip(blocks_R, flight.open_R.tolist(), strict=True) if is_open]
        if not self._options.leaves_by_row:
            left = sorted(set(left))
        for block in left:
            if block != self._blocks:
                self._session.report(ExitTaken(block))

    def _settle(self, flight: _Flight) -> None:
        """The last server has answered the oldest token, so its successor is certain."""
        guess = flight.guess
        if flight.seen_at is not None:
            self._looks.on_answer(time.perf_counter() - flight.seen_at)
        outputs_R1H = self._session.outputs(flight.step, self._blocks)
        blocks_R = [one or self._blocks for one in self._session.left(flight.step, self._blocks)]
        self._session.settle(flight.step)
        if guess is not None and not self._options.verify:
            return
        tokens_R = self._chosen(flight.tokens_RT, self._reader.logits(outputs_R1H, blocks_R))
        tokens_R = self._padded(tokens_R, self._open_R)
        if guess is None:
            self._report_exits(flight, blocks_R)
            return self._add(tokens_R)
        stands = torch.equal(tokens_R, guess.tokens_R)
        self._session.report(ExitVerified(guess.block, stands))
        if not stands:
            self._give_up_behind(None)
        self._add(tokens_R)

    def _give_up_behind(self, flight: _Flight | None) -> None:
        """Give up this token's successor, and all that were sent off after this one; with None, all."""
        kept = 0 if flight is None else self._flights.index(flight) + 1
        self._output.keep_provisional(max(0, kept - 1))
        if len(self._flights) > kept:
            self._session.give_up(self._flights[kept].step)
        while len(self._flights) > kept:
            self._flights.pop()

    def _add(self, tokens_R: torch.Tensor) -> None:
        """The next token of each sequence is certain."""
        self._tokens_RT = _extended(self._tokens_RT, tokens_R)
        self._noise.forget(self._tokens_RT.shape[1])
        self._open_R = self._open_R & ~self._sampling.is_finished(self._tokens_RT)
        self._output.put(tokens_R)

    def _chosen(self, tokens_RT: torch.Tensor, logits_RV: torch.Tensor) -> torch.Tensor:
        """The successors `[R]` of sequences, from the logits behind them."""
        scores_RV = self._sampling.process(tokens_RT, logits_RV)
        if not self._sampling.sample:
            return scores_RV.argmax(-1)
        return self._noise.draw(scores_RV.softmax(-1), tokens_RT.shape[1])

    def _padded(self, tokens_R: torch.Tensor, open_R: torch.Tensor) -> torch.Tensor:
        """The tokens, and the padding token for sequences that have ended."""
        return tokens_R if self._sampling.pad is None else torch.where(open_R, tokens_R, self._sampling.pad)

    def _still_open(self, tokens_R: torch.Tensor, open_R: torch.Tensor) -> torch.Tensor:
        """Sequences that uncertain tokens do not end."""
        return open_R if self._sampling.ends is None else open_R & ~torch.isin(tokens_R, self._sampling.ends)


def _extended(tokens_RT: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    return torch.cat([tokens_RT, tokens_R.unsqueeze(1)], dim=1)


class HiddenReader:
    """Reads the hidden states of one `generate` call.

    Args:
        options: when tokens leave.
        exits: lenses and classifiers, for the boundaries that have some.
        head: hidden states `[R, 1, H]` behind the last block, or as if they were, to logits `[R, V]`.
    """

    def __init__(self, options: EarlyExit, exits: TrainedExits, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._options, self._exits, self._head = options, exits, head

    def logits(self, hidden_R1H: torch.Tensor, blocks_R: Sequence[int]) -> torch.Tensor:
        """The logits `[R, V]` of hidden states in front of a block of each sequence, through its lens if there is one.

        The number of the model's blocks stands for behind the last one.
        """
        read_R1H = hidden_R1H
        for block in set(blocks_R):
            lens = self._exits.lenses.get(block)
            if lens is not None:
                there_R11 = torch.tensor([one == block for one in blocks_R], device=hidden_R1H.device).view(-1, 1, 1)
                read_R1H = torch.where(there_R11, lens(hidden_R1H), read_R1H)
        return self._head(read_R1H)

    def confidence(
        self, block: int, before_RH: torch.Tensor, hidden_R1H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """How sure tokens in front of `block` are `[R]`, and their logits `[R, V]` if these had to be computed.

        Without a classifier for this block, they are not sure.

        Args:
            before_RH: hidden states where these tokens were looked at before.
        """
        match self._options.confidence:
            case "similarity":
                return state_similarity(before_RH, hidden_R1H[:, -1]), None
            case "classifier":
                return self._classified(block, hidden_R1H[:, -1]), None
        logits_RV = self.logits(hidden_R1H, [block] * len(hidden_R1H))
        return softmax_response(logits_RV), logits_RV

    def _classified(self, block: int, hidden_RH: torch.Tensor) -> torch.Tensor:
        classifier = self._exits.classifiers.get(block)
        return classifier(hidden_RH) if classifier is not None else torch.zeros(len(hidden_RH), device=hidden_RH.device)


class LookMeter:
    """Decides whether looking at tokens can save time.

    A look computes the model's head. Where the last server answers soon after the first, its answer is there almost as
    soon as the look is over, and wrong guesses cost the servers work.
    """

    def __init__(self) -> None:
        self._look_s: float | None = None
        self._lag_s: float | None = None
        self._skipped = 0

    def on_look(self, seconds: float) -> None:
        """A token was looked at."""
        self._look_s = averaged(self._look_s, seconds, KEPT_SHARE)

    def on_answer(self, lag_s: float) -> None:
        """The last server has answered this long after the token could first be looked at."""
        self._lag_s = averaged(self._lag_s, lag_s, KEPT_SHARE)

    def is_worth_looking(self) -> bool:
        """Whether to look at the next token."""
        if self._look_s is None or self._lag_s is None or self._lag_s >= MIN_GAIN * self._look_s:
            return True
        self._skipped = (self._skipped + 1) % TRIED_EVERY
        return self._skipped == 0
