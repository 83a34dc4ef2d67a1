"""Early exit behind a gateway: tokens a second of many streams, and the time between a stream's tokens.

    python -m benchmarks.serving.gateway_exits [--thresholds 0.1] [--streams 8] [--seconds 20] [--tokens 64]
        [--delay SECONDS]

One gateway of the demo model on three servers, in processes with one torch thread each; with `--delay`, everything
between them arrives so much later. Requests without early exit take turns with requests that ask for it. Answers are
verified, so both are the same texts, drawn with the same seeds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.common.delayed import DelayedPeer, Network
from benchmarks.common.report import Report, report_parser
from benchmarks.common.slow_network import slow_servers
from benchmarks.serving.gateway import MODEL, PROMPT, SPANS
from swarm.cli.local_swarm import LocalSwarm, PeerProcess
from swarm.client import connection
from swarm.gateway.__main__ import main as serve
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.p2p import quiet_hivemind

GATEWAY = "--gateway"
"""First argument of the gateway's process."""

PROMPTS = (PROMPT, '"My dear Watson," said Holmes, "it is', "KING:\nMy lord, I", "My fellow citizens, we have")


@dataclass
class Load:
    """The same load again and again.

    Attributes:
        early_exit: of the requests.
        rate: tokens per second of all streams together, of the newest run.
        gap_s: median seconds between two tokens of a stream.
        late_gap_s: what 95 of 100 are shorter than.
        texts: answers, by number of the request.
    """

    early_exit: dict[str, Any] | bool
    rate: float = 0.0
    gap_s: float = 0.0
    late_gap_s: float = 0.0
    texts: dict[int, str] = field(default_factory=dict)

    async def run(self, url: str, streams: int, seconds: float, tokens: int) -> None:
        """Run `streams` streams for `seconds`, each one request after the other."""
        began, done, number = time.perf_counter(), 0, 0
        gaps_s: list[float] = []
        async with httpx.AsyncClient(timeout=120) as client:

            async def one() -> None:
                nonlocal done, number
                while time.perf_counter() - began < seconds:
                    chosen, number = number, number + 1
                    text, arrived_s = await self._read(client, url, chosen, tokens)
                    self.texts[chosen] = text
                    done += len(arrived_s)
                    gaps_s.extend(later - one for one, later in pairwise(arrived_s))

            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(one())
        self.rate = done / (time.perf_counter() - began)
        cuts = statistics.quantiles(gaps_s, n=20)
        self.gap_s, self.late_gap_s = cuts[9], cuts[18]

    async def _read(self, client: httpx.AsyncClient, url: str, number: int, tokens: int) -> tuple[str, list[float]]:
        """An answer, and when each of its tokens came. Tokens that came together have the same time."""
        content = {
            "model": MODEL,
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_tokens": tokens,
            "temperature": 1,
            "seed": number,
            "stream": True,
            "logprobs": 0,
            "early_exit": self.early_exit,
        }
        text, arrived_s = "", []
        async with client.stream("POST", url, json=content) as reply:
            if reply.is_error:
                raise SystemExit((await reply.aread()).decode())
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise SystemExit(line)
                (choice,) = event["choices"]
                text += choice["text"]
                arrived_s += [time.perf_counter()] * len((choice["logprobs"] or {}).get("tokens", ()))
        return text, arrived_s


@contextmanager
def gateway(delay: float) -> Iterator[str]:
    """Start servers and a gateway; yields the URL for completions."""
    with ExitStack() as stack:
        if delay:
            address = stack.enter_context(slow_servers(DEMO_FOLDER, SPANS, delay))
        else:
            servers = LocalSwarm(None, SPANS, options=("--threads", "1", "--cache-tokens", "65536"))
            address = stack.enter_context(servers).address
        options = ("--initial-peers", address, "--port", "0", "--wire", "none")
        arguments = ("benchmarks.serving.gateway_exits", GATEWAY, str(delay), *options)
        process = PeerProcess(arguments, {"OMP_NUM_THREADS": "1"})
        stack.callback(process.stop)
        yield process.wait_for(r"^Gateway: (\S+)/$")[1] + "/v1/completions"


def run_gateway(delay: float, *arguments: str) -> None:
    """The gateway's process."""
    if delay:
        DelayedPeer.network = Network.read(str(delay))
        connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    serve(arguments)


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--thresholds", default="0.1")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20, help="of one turn")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, one way")
    arguments = parser.parse_args()
    quiet_hivemind()
    loads = [Load(False), *(Load({"threshold": float(one)}) for one in arguments.thresholds.split(","))]
    plain = loads[0]
    with Report(arguments) as report, gateway(arguments.delay) as url:
        for one in loads:
            asyncio.run(one.run(url, arguments.streams, 2.0, arguments.tokens))  # warms up
        for _ in report.rounds(f"{arguments.streams} streams"):
            for one in loads:
                asyncio.run(one.run(url, arguments.streams, arguments.seconds, arguments.tokens))
                where = f"softmax > {one.early_exit['threshold']:g}" if isinstance(one.early_exit, dict) else "no exits"
                report.add("tokens/s together", one.rate, "more", where=where)
                report.add("times plain", one.rate / plain.rate, "more", decides=True, where=where)
                report.add("ms between tokens, median", 1e3 * one.gap_s, "less", where=where)
                report.add("95 of 100 are below", 1e3 * one.late_gap_s, "less", where=where)
                if any(one.texts[number] != plain.texts[number] for number in one.texts.keys() & plain.texts.keys()):
                    raise SystemExit(f"{one.early_exit}: some texts differ from those without early exit")


if __name__ == "__main__":
    if sys.argv[1:2] == [GATEWAY]:
        run_gateway(float(sys.argv[2]), *sys.argv[3:])
    else:
        main()
