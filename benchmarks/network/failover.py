"""How long a text pauses when a server of its route is lost, compared with restarting the session.

    python -m benchmarks.network.failover [--failovers 15] [--restarts 6] [--position 256] [--json FILE]

The demo model runs in six server processes, two for each span of four blocks, in fp32, greedy, batch 1. Before the step
at the position, the server of each span in turn is killed with `kill -9`, or hung with SIGSTOP, or made to answer each
step after 2 s. The pause lasts from just before the signal until the next token; a server that drips also costs what
all further tokens take beyond their usual time. A restart is what a client without failover would do after the same
kill: open a new session and prefill the whole text so far, either by the client that knows the swarm or by a new
client. Every text is compared with that of the local model.
"""

from __future__ import annotations

import argparse
import enum
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteriaList

from benchmarks.common import machine
from swarm.client.session import InferenceSession
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.p2p import quiet_hivemind
from tests.disturbances import Before, Event, demo_prompt, demo_text, dripping, greedy, holder
from tests.swarms import ServerProcess, TestSwarm, run_client, run_swarm

SPANS = ("0:4", "4:8", "8:12")
TOKENS_AROUND_LOSS = 32
"""Number of tokens generated before the loss, and after it; all earlier tokens are the prompt."""


class Loss(enum.Enum):
    """How a server is lost."""

    KILLED = enum.auto()
    HUNG = enum.auto()
    DRIPS = enum.auto()


@dataclass
class FailoverTimes:
    """Measured times in seconds.

    Attributes:
        token: each token without a failover.
        killed, hung, dripped: the pause of each failover from a killed or a hung server, or one that drips.
        drip: what such a server cost in all, the pause included.
        restarted: a new session of the same client.
        fresh: a new client with a session.
    """

    token: list[float] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    hung: list[float] = field(default_factory=list)
    dripped: list[float] = field(default_factory=list)
    drip: list[float] = field(default_factory=list)
    restarted: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)


class FailoverTrial:
    """Generates texts that each lose one server at the same position."""

    def __init__(self, swarm: TestSwarm, position: int) -> None:
        story = demo_prompt("Once upon a time there was a little dog who wanted to see the sea. " * (position // 8))
        self.figures = FailoverTimes()
        self._swarm = swarm
        self._position = position
        self._prompt = story[:, : position - TOKENS_AROUND_LOSS]
        self._text = demo_text(self._prompt, 2 * TOKENS_AROUND_LOSS)
        self._lost: list[ServerProcess] = []

    def fail_over(self, model: Any, number: int, how: Loss) -> None:
        """Lose a server in the middle of a text, and continue."""
        model.swarm.servers()
        lost_before = TOKENS_AROUND_LOSS + 2  # that token's step is the first one at the position
        with ExitStack() as until_written:
            session = until_written.enter_context(
                model.inference_session(max_length=self._position + TOKENS_AROUND_LOSS)
            )
            before = Before(session, {lost_before: self._lose(number, how, until_written)})
            written = greedy(
                model, self._prompt, 2 * TOKENS_AROUND_LOSS, stopping_criteria=StoppingCriteriaList([before])
            )
        self._check(written, self._text)
        gaps = [later - earlier for earlier, later in zip(before.times, before.times[1:], strict=False)]
        usual = statistics.median(gaps)
        later = gaps[lost_before - 2 :]
        pause = gaps.pop(lost_before - 2)
        match how:
            case Loss.KILLED:
                self.figures.killed.append(pause)
            case Loss.HUNG:
                self.figures.hung.append(pause)
            case Loss.DRIPS:
                self.figures.dripped.append(pause)
                self.figures.drip.append(sum(later) - usual * len(later))
        if how is not Loss.DRIPS:
            self.figures.token += gaps
        self._replace()

    def restart(self, model: Any, number: int) -> None:
        """Lose a server, and restart with the text so far."""
        model.swarm.servers()
        so_far = torch.cat([self._prompt, torch.tensor([self._text[: TOKENS_AROUND_LOSS + 1]])], dim=1)
        with model.inference_session(max_length=self._position + TOKENS_AROUND_LOSS) as session:
            self._check(greedy(model, self._prompt, TOKENS_AROUND_LOSS + 1), self._text[: TOKENS_AROUND_LOSS + 1])
            began = time.perf_counter()
            self._lose(number, Loss.KILLED, ExitStack())(session)
            with model.inference_session(max_length=self._position + TOKENS_AROUND_LOSS):
                again = greedy(model, so_far, 1)
            self.figures.restarted.append(time.perf_counter() - began)
        self._check(again, self._text[TOKENS_AROUND_LOSS + 1 : TOKENS_AROUND_LOSS + 2])
        began = time.perf_counter()
        with run_client(self._swarm, dtype="float32") as client:
            again = greedy(client, so_far, 1)
            self.figures.fresh.append(time.perf_counter() - began)
        self._check(again, self._text[TOKENS_AROUND_LOSS + 1 : TOKENS_AROUND_LOSS + 2])
        self._replace()

    def _lose(self, number: int, how: Loss, until_written: ExitStack) -> Event:
        def lose_server(session: InferenceSession) -> None:
            assert session.position == self._position
            self._lost = [holder(self._swarm, session, 4 * (number % len(SPANS)))]
            for server in self._lost:
                match how:
                    case Loss.KILLED:
                        server.kill()
                    case Loss.HUNG:
                        server.freeze()
                    case Loss.DRIPS:
                        until_written.enter_context(dripping(server))

        return lose_server

    def _replace(self) -> None:
        for server in self._lost:
            server.kill()
            self._swarm.start(server.blocks, dtype="float32").wait_ready()

    def _check(self, written: Sequence[int], right: Sequence[int]) -> None:
        if list(written) != list(right):
            raise SystemExit("the tokens differ from the model's own")


def measure(failovers: int, restarts: int, position: int) -> FailoverTimes:
    """Run all trials, on the spans in turn."""
    torch.set_num_threads(1)
    with run_swarm(DEMO_FOLDER, SPANS * 2, dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        trial = FailoverTrial(swarm, position)
        for number in range(failovers):
            trial.fail_over(model, number, Loss.KILLED)
        for number in range(restarts):
            trial.restart(model, number)
            for _ in range(2):
                trial.fail_over(model, number, Loss.HUNG)
            trial.fail_over(model, number, Loss.DRIPS)
    return trial.figures


def table(figures: FailoverTimes, position: int) -> str:
    """Format the results in Markdown."""
    rows = {
        "token without failover": figures.token,
        "failover, a server killed": figures.killed,
        "failover, a server hung": figures.hung,
        "failover, a server that answers after 2 s": figures.dripped,
        "such a server, over the 32 tokens after": figures.drip,
        "restart by the same client, a server killed": figures.restarted,
        "restart by a new client, a server killed": figures.fresh,
    }
    return "\n".join(
        [
            f"demo model, position {position}",
            "",
            "| event | count | seconds, median (range) | median in tokens |",
            "| --- | --- | --- | --- |",
            *(_row(name, seconds, statistics.median(figures.token)) for name, seconds in rows.items()),
        ]
    )


def _row(name: str, seconds: Sequence[float], token: float) -> str:
    median = statistics.median(seconds)
    spread = f"{median:.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
    return f"| {name} | {len(seconds)} | {spread} | {median / token:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failovers", type=int, default=15)
    parser.add_argument("--restarts", type=int, default=6, help="restarts, and servers that drip; twice as many hang")
    parser.add_argument("--position", type=int, default=256)
    parser.add_argument("--json", type=Path, help="also write the raw results to this file")
    arguments = parser.parse_args()
    quiet_hivemind()
    about = machine.describe()
    figures = measure(arguments.failovers, arguments.restarts, arguments.position)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(table(figures, arguments.position))
    if arguments.json:
        raw = {"machine": about, "position": arguments.position, "seconds": asdict(figures)}
        arguments.json.write_text(json.dumps(raw, indent=2) + "\n")


if __name__ == "__main__":
    main()
