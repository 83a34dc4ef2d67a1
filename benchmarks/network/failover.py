"""How long a text pauses when a server of its route is lost, compared with restarting the session.

    python -m benchmarks.network.failover [--position 256]

The demo model runs in six server processes, two for each span of four blocks, in fp32, greedy, batch 1. Before the step
at the position, the server of each span in turn is killed with `kill -9`, or hung with SIGSTOP, or made to answer each
step after 2 s. The pause lasts from just before the signal until the next token; a server that drips also costs what
all further tokens take beyond their usual time. A restart is what a client without failover would do after the same
kill: open a new session and prefill the whole text so far, either by the client that knows the swarm or by a new
client. Every text is compared with that of the local model.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import StoppingCriteriaList

from benchmarks.common.report import Report, report_parser
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

    KILLED = "failover, a server killed"
    HUNG = "failover, a server hung"
    DRIPS = "failover, a server that answers after 2 s"


class FailoverTrial:
    """Generates texts that each lose one server at the same position."""

    def __init__(self, report: Report, swarm: TestSwarm, position: int) -> None:
        story = demo_prompt("Once upon a time there was a little dog who wanted to see the sea. " * (position // 8))
        self._report = report
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
        pause, later = gaps[lost_before - 2], gaps[lost_before - 2 :]
        self._add(how.value, pause, usual)
        if how is Loss.DRIPS:
            self._add("such a server, over the 32 tokens after", sum(later) - usual * len(later), usual)
        else:
            self._add("token without failover", usual, usual)
        self._replace()

    def _add(self, event: str, seconds: float, usual: float) -> None:
        self._report.add("seconds", seconds, "less", where=event)
        self._report.add("in tokens", seconds / usual, "less", where=event)

    def restart(self, model: Any, number: int) -> None:
        """Lose a server, and restart with the text so far."""
        model.swarm.servers()
        so_far = torch.cat([self._prompt, torch.tensor([self._text[: TOKENS_AROUND_LOSS + 1]])], dim=1)
        with model.inference_session(max_length=self._position + TOKENS_AROUND_LOSS) as session:
            began = time.perf_counter()
            self._check(greedy(model, self._prompt, TOKENS_AROUND_LOSS + 1), self._text[: TOKENS_AROUND_LOSS + 1])
            usual = (time.perf_counter() - began) / TOKENS_AROUND_LOSS
            began = time.perf_counter()
            self._lose(number, Loss.KILLED, ExitStack())(session)
            with model.inference_session(max_length=self._position + TOKENS_AROUND_LOSS):
                again = greedy(model, so_far, 1)
            self._add("restart by the same client, a server killed", time.perf_counter() - began, usual)
        self._check(again, self._text[TOKENS_AROUND_LOSS + 1 : TOKENS_AROUND_LOSS + 2])
        began = time.perf_counter()
        with run_client(self._swarm, dtype="float32") as client:
            again = greedy(client, so_far, 1)
            self._add("restart by a new client, a server killed", time.perf_counter() - began, usual)
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


def main() -> None:
    parser = report_parser(__doc__, repeats=6)
    parser.add_argument("--position", type=int, default=256)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    with (
        Report(arguments) as report,
        run_swarm(DEMO_FOLDER, SPANS * 2, dtype="float32") as swarm,
        run_client(swarm, dtype="float32") as model,
    ):
        trial = FailoverTrial(report, swarm, arguments.position)
        for number in report.rounds(f"demo model, position {arguments.position}"):
            for how in (Loss.KILLED, Loss.KILLED, Loss.HUNG, Loss.DRIPS):
                trial.fail_over(model, number, how)
            trial.restart(model, number)


if __name__ == "__main__":
    main()
