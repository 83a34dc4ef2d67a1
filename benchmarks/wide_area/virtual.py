"""Servers far apart on a virtual clock, for the real loop of speculative decoding."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.wide_area.planted import PlantedDraft
from swarm.client.early_exit.token_output import TokenOutput
from swarm.client.sampling import Sampling
from swarm.client.session import StepUnderWay
from swarm.client.speculation.drafts import Draft
from swarm.client.speculation.stream_decoder import StreamDecoder
from swarm.data_structures import HopTiming

VOCABULARY = 64
PROMPT = 8


def right_token(position: int) -> int:
    """The token that the model writes at a position."""
    return position * 2654435761 % 1000003 % VOCABULARY


@dataclass(frozen=True)
class Chain:
    """Servers one behind the other.

    Attributes:
        servers: how many.
        delay_s: one way, between any two machines.
        step_s: of a server, for a step of one token.
        token_s: for each further token of the same step.
        send_s: what sending a step costs the client.
        read_s: what an answer costs it.
        draft_s: what a guess costs it.
    """

    servers: int = 4
    delay_s: float = 0.05
    step_s: float = 0.004
    token_s: float = 0.0005
    send_s: float = 0.001
    read_s: float = 0.001
    draft_s: float = 0.001

    @property
    def round_s(self) -> float:
        """From a token to its successor."""
        return (self.servers + 1) * self.delay_s + self.servers * self.step_s + self.send_s + self.read_s

    def bound(self, right: float) -> float:
        """Tokens per second if a wrong guess costs one round, and all else flows at the rate of the slowest stage."""
        slowest = max(self.step_s, self.send_s + self.read_s + self.draft_s)
        return 1 / ((1 - right) * self.round_s + right * slowest)


@dataclass
class _Step:
    number: int
    epoch: int
    before: int
    tokens: int
    answered: bool = False


@dataclass
class _Server:
    """Computes one step after the other, and drops those that were given up."""

    queue: deque[_Step] = field(default_factory=deque)
    is_busy: bool = False
    epoch: int = 0
    computed: int = 0


class VirtualSwarm:
    """A chain, its session, and the model's forward, as `StreamDecoder` uses them."""

    def __init__(self, chain: Chain) -> None:
        self.now = 0.0
        self.position = PROMPT
        self.verified = self.stood = 0
        self._chain = chain
        self._servers = [_Server() for _ in range(chain.servers)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._steps: dict[int, _Step] = {}
        self._numbers = itertools.count()
        self._epoch = 0
        self._compute_s = 0.0

    # The model's forward.

    def send(self, tokens_1T: torch.Tensor, count: int, waits: bool) -> StepUnderWay:
        before = tokens_1T.shape[1] - count
        assert before == self.position
        number = next(self._numbers)
        step = self._steps[number] = _Step(number, self._epoch, before, count)
        self.position += count
        self.elapse(self._chain.send_s)
        self._at(self._chain.delay_s, lambda: self._arrive(0, step))
        return StepUnderWay(number, before, tokens_1T[:, -count:, None].float(), None)

    def begins_again(self, length: int) -> bool:
        return False

    def compute(self, tokens_1T: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden_1NH: torch.Tensor) -> torch.Tensor:
        right = [right_token(int(place)) for place in hidden_1NH[0, :, 0].tolist()]
        return torch.nn.functional.one_hot(torch.tensor(right), VOCABULARY).float()

    # The session.

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        return (HopTiming(self._chain.round_s, self._compute_s),)

    def has_outputs(self, step: StepUnderWay, block: int) -> bool:
        return self._steps[step.number].answered

    def outputs(self, step: StepUnderWay, block: int) -> torch.Tensor:
        self.elapse(self._chain.read_s)
        count = self._steps[step.number].tokens
        return torch.arange(step.before + 1, step.before + 1 + count).view(1, -1, 1).float()

    def wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._run_next()

    def settle(self, step: StepUnderWay) -> None:
        del self._steps[step.number]

    def give_up(self, first: StepUnderWay) -> None:
        for number in [number for number in self._steps if number >= first.number]:
            del self._steps[number]
        self.position = min(self.position, first.before)
        self._epoch += 1
        epoch = self._epoch
        for server in self._servers:
            self._at(self._chain.delay_s, lambda server=server: self._give_up(server, epoch))

    def report(self, event: Any) -> None:
        self.verified += 1
        self.stood += event.stands

    # Time.

    def clock(self) -> float:
        return self.now

    def elapse(self, seconds: float) -> None:
        """The client is busy."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self._run_next()
        self.now = until

    @property
    def computed(self) -> int:
        """Tokens that the servers have computed, on the average."""
        return sum(server.computed for server in self._servers) // len(self._servers)

    def _run_next(self) -> None:
        when, _, event = heapq.heappop(self._events)
        self.now = max(self.now, when)
        event()

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ties), event))

    def _arrive(self, place: int, step: _Step) -> None:
        if place == len(self._servers):
            step.answered = True
            return
        server = self._servers[place]
        server.epoch = max(server.epoch, step.epoch)
        server.queue.append(step)
        self._begin(place)

    def _give_up(self, server: _Server, epoch: int) -> None:
        server.epoch = max(server.epoch, epoch)

    def _begin(self, place: int) -> None:
        server = self._servers[place]
        while not server.is_busy and server.queue:
            step = server.queue.popleft()
            if step.epoch >= server.epoch:
                server.is_busy = True
                server.computed += step.tokens
                self._compute_s = self._chain.step_s + (step.tokens - 1) * self._chain.token_s
                self._at(self._compute_s, partial(self._end, place, step))

    def _end(self, place: int, step: _Step) -> None:
        server = self._servers[place]
        server.is_busy = False
        if step.epoch >= server.epoch:
            self._at(self._chain.delay_s, partial(self._arrive, place + 1, step))
        self._begin(place)


@dataclass(frozen=True)
class Measured:
    """One text.

    Attributes:
        rate: tokens per second.
        computed: tokens that servers computed for each that stands.
        stood: share of the guesses that were verified.
    """

    rate: float
    computed: float
    stood: float


def generate(chain: Chain, tokens: int, drafts: Callable[[VirtualSwarm], Sequence[Draft]]) -> Measured:
    """Have the loop write a text."""
    swarm = VirtualSwarm(chain)
    sampling = Sampling(
        process=lambda tokens_1T, logits_1V: logits_1V,
        is_finished=lambda tokens_1T: torch.tensor([tokens_1T.shape[1] >= PROMPT + tokens]),
        sample=False,
        pad=None,
        ends=None,
        max_length=PROMPT + tokens,
    )
    decoder = StreamDecoder(
        drafts(swarm),
        swarm,
        swarm,
        sampling,
        sampling.process,
        TokenOutput(),
        blocks=1,
        overhead=chain.step_s / chain.token_s,
        memory={},
        room=lambda length: PROMPT + tokens - 1,
        clock=swarm.clock,
    )
    prompt_1T = torch.tensor([[right_token(place) for place in range(PROMPT)]])
    text_1T = decoder.generate(prompt_1T, None, swarm.logits(torch.tensor([[[float(PROMPT)]]])), PROMPT)
    assert text_1T[0].tolist() == [right_token(place) for place in range(PROMPT + tokens)]
    return Measured(tokens / swarm.now, swarm.computed / tokens, swarm.stood / max(1, swarm.verified))


def planted(chain: Chain, right: float, tokens: int, seed: int) -> Measured:
    """A text with a draft that is right with this probability."""
    return generate(
        chain,
        tokens,
        lambda swarm: [PlantedDraft(right, seed, right_token, VOCABULARY, lambda: swarm.elapse(chain.draft_s))],
    )
