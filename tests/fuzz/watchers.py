"""What must hold throughout the campaign, and how it is watched: from outside, by what processes tell anybody."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from itertools import pairwise

import httpx
import psutil

from tests.fuzz.bystander import Bystander, IdleLoop
from tests.fuzz.targets import CACHE_TOKEN_BYTES, Target, Targets
from tests.metrics.readings import Readings, parse

PERIOD_S = 2.0
CONSTANT_BYTES = 64 << 20
"""What a process may take beyond what it has accounted for: buffers of streams, and what an allocator keeps."""

MAX_GATEWAY_REQUEST_BYTES = 256 << 20
"""What a gateway keeps for requests that are not admitted yet (`swarm.gateway.gateway_state`)."""

MAX_LAG_S = 0.05
"""Of an event loop at the 99th percentile, beyond that of a loop with nothing to do."""

MIN_LOOKS = 2000
"""Looks at a loop that a 99th percentile takes, so that twenty of them decide. In half a minute three do, and whichever
other process had the core just then would be blamed on the loop."""

BUSY_LAG_S = 0.02
"""Beyond this lag of a loop with nothing to do, the machine is busy with other things, and times are told, not judged:
a process that computes waits many times as long for its turn as one that sleeps."""

TIMED_OUT = "did not answer in time"

MAX_PAUSE_S = 10.0
"""Between two tokens of the bystander. One server that has to be asked again takes less."""

RETURN_TIMEOUT_S = 150.0
"""How long what was taken may stay after the last message. A session waits 30 s for its client."""

MORE_TASKS, MORE_FILES = 8, 16
"""What may be open besides, such as a look-up of the DHT or a connection to Prometheus."""


@dataclass(frozen=True)
class Taken:
    """What a process has at one moment.

    Attributes:
        accounted: bytes that it says it has for others.
        tasks: in its event loop.
        files: open files of the process and its libp2p daemon.
        sessions: that are open.
        cache_tokens: that they have reserved.
        charged: bytes of requests on their way.
    """

    resident: int
    accounted: int
    tasks: int
    files: int
    sessions: int
    cache_tokens: int
    charged: int


@dataclass
class Watched:
    """One process under watch.

    Attributes:
        before: what it had before anybody came.
        accounted: the most that it accounted for at any moment.
        beyond: the most bytes that it took beyond that and what it had before.
        lag_before: its lag's histogram then.
    """

    target: Target
    before: Taken
    lag_before: dict[float, float]
    accounted: int = 0
    beyond: int = 0
    log_offset: int = 0


class Watch:
    """Watches the targets of one campaign. Make it when nobody uses the swarm yet.

    Attributes:
        violations: what did not hold, as text.
    """

    def __init__(self, targets: Targets, idle: IdleLoop) -> None:
        self.violations: list[str] = []
        self._idle = idle
        self._idle_before = lag_histogram(parse(idle.read()))
        self._watched = [_begin(target) for target in targets.all]
        self._honest = {server.peer_id: server.name for server in targets.servers}
        self._bystander: Bystander | None = None
        self._told: set[str] = set()
        self._is_busy = False

    async def run(self, bystander: Bystander) -> None:
        """Look at everything regularly until the task is canceled."""
        self._bystander = bystander
        while True:
            try:
                bystander.listen()
            except EOFError:
                self._tell("the bystander has died")
            await asyncio.to_thread(self._look)
            await asyncio.sleep(PERIOD_S)

    def _look(self) -> None:
        for one in self._watched:
            try:
                now = take_stock(one.target)
            except (psutil.NoSuchProcess, httpx.HTTPError) as error:
                self._tell(f"{one.target.name} does not answer: {error!r}")
                continue
            one.accounted = max(one.accounted, now.accounted)
            one.beyond = max(one.beyond, now.resident - one.before.resident - one.accounted)
            self._read_log(one)

    def _read_log(self, one: Watched) -> None:
        with one.target.log_file.open("rb") as file:
            file.seek(one.log_offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                one.log_offset += len(line)
                wrong = wrong_in_log(line.decode(errors="replace").strip())
                if wrong:
                    self._tell(f"{one.target.name} logged: {wrong}")

    def _tell(self, violation: str) -> None:
        if violation not in self._told:
            self._told.add(violation)
            self.violations.append(violation)

    def _tell_time(self, violation: str) -> None:
        if not self._is_busy:
            self._tell(violation)

    async def judge(self) -> list[str]:
        """Wait until everything is given back, and say in lines of text how everybody was.

        Call it when neither bystander nor attackers are there any more.
        """
        idle = since(lag_histogram(parse(self._idle.read())), self._idle_before)
        idle_lag = quantile(idle, 0.99)
        lines = [f"A loop with nothing to do was {idle_lag * 1000:.0f} ms late at the 99th percentile."]
        self._is_busy = idle_lag > BUSY_LAG_S
        if self._is_busy:
            lines.append("So the machine was busy with other things, and times are not judged.")
        for one in self._watched:
            looks = since(lag_histogram(read_metrics(one.target)), one.lag_before)
            lag = quantile(looks, 0.99)
            if lag > MAX_LAG_S + idle_lag and count(looks) >= MIN_LOOKS:
                self._tell_time(
                    f"{one.target.name}: its event loop was {lag * 1000:.0f} ms late at the 99th percentile, and an "
                    f"idle one {idle_lag * 1000:.0f} ms"
                )
            if one.beyond > CONSTANT_BYTES:
                self._tell(
                    f"{one.target.name} took {one.beyond >> 20} MiB more than the {one.accounted >> 20} MiB that it "
                    "accounted for"
                )
            lines.append(
                f"{one.target.name}: lag {lag * 1000:.0f} ms, accounted {one.accounted >> 20} MiB at most, "
                f"{one.beyond >> 20} MiB beyond"
            )
        await self._until_returned(lines)
        self._judge_bystander(lines)
        return lines

    async def _until_returned(self, lines: list[str]) -> None:
        deadline = time.monotonic() + RETURN_TIMEOUT_S
        left = {one.target.name: one for one in self._watched}
        while left:
            for one in list(left.values()):
                now = await asyncio.to_thread(take_stock, one.target)
                kept = not_returned(one.before, now)
                if not kept:
                    del left[one.target.name]
                elif time.monotonic() > deadline:
                    self._tell(f"{one.target.name} has not given back: {', '.join(kept)}")
                    del left[one.target.name]
            await asyncio.sleep(1.0)
        await asyncio.to_thread(self._look)

    def _judge_bystander(self, lines: list[str]) -> None:
        assert self._bystander is not None
        texts, tokens = self._bystander.texts, self._bystander.token_seconds
        for text in texts:
            if not text.is_exact:
                self._tell(f"the bystander's text was wrong: {text.error or 'other tokens'}")
        if not tokens:
            self._tell("the bystander has written nothing")
            return
        if tokens[-1] > MAX_PAUSE_S:
            self._tell_time(f"the bystander waited {tokens[-1]:.1f} s for a token")
        for avoided in self._bystander.avoided:
            name = self._honest.get(avoided.peer_id)
            if name is not None:
                tell = self._tell_time if avoided.reason == TIMED_OUT else self._tell
                tell(f"the bystander avoided {name}, because it {avoided.reason}")
        lines.append(
            f"The bystander wrote {len(texts)} texts; a token took {tokens[len(tokens) // 2] * 1000:.0f} ms (median), "
            f"{tokens[int(len(tokens) * 0.99)] * 1000:.0f} ms (99th percentile), {tokens[-1]:.1f} s at most."
        )


def _begin(target: Target) -> Watched:
    return Watched(target, take_stock(target), lag_histogram(read_metrics(target)))


def read_metrics(target: Target) -> Readings:
    """What Prometheus would read."""
    return parse(httpx.get(target.metrics_url, timeout=60).text)


def take_stock(target: Target) -> Taken:
    """What a process has now. Raises `psutil.NoSuchProcess` or `httpx.HTTPError` if it has ended."""
    process = psutil.Process(target.pid)
    metrics = read_metrics(target)
    files = sum(one.num_fds() for one in (process, *process.children()))
    charged = int(total(metrics, "swarm_server_memory_bytes"))
    cache_tokens = int(total(metrics, "swarm_server_cache_used_tokens"))
    accounted = charged + cache_tokens * CACHE_TOKEN_BYTES
    accounted += int(total(metrics, "swarm_server_adapter_bytes") + total(metrics, "swarm_dht_record_bytes"))
    if total(metrics, "swarm_gateway_running") or target.name == "gateway":
        accounted += MAX_GATEWAY_REQUEST_BYTES
    return Taken(
        resident=process.memory_info().rss,
        accounted=accounted,
        tasks=int(total(metrics, "swarm_loop_tasks")),
        files=files,
        sessions=int(total(metrics, "swarm_server_sessions_open")),
        cache_tokens=cache_tokens,
        charged=charged,
    )


def not_returned(before: Taken, now: Taken) -> list[str]:
    """What a process keeps that it did not have before."""
    allowed = {"tasks": MORE_TASKS, "files": MORE_FILES, "sessions": 0, "cache_tokens": 0, "charged": 0}
    return [
        f"{name} {getattr(before, name)} -> {getattr(now, name)}"
        for name, more in allowed.items()
        if getattr(now, name) > getattr(before, name) + more
    ]


def total(readings: Readings, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for (found, _), value in readings.items() if found == name)


def lag_histogram(readings: Readings) -> dict[float, float]:
    """How often the event loop was at most so late."""
    return {
        float(dict(labels)["le"]): value
        for (name, labels), value in readings.items()
        if name == "swarm_loop_lag_seconds_bucket"
    }


def since(now: dict[float, float], before: dict[float, float]) -> dict[float, float]:
    """The histogram of what has come since."""
    return {bound: count - before.get(bound, 0.0) for bound, count in now.items()}


def count(histogram: dict[float, float]) -> float:
    """How many values a histogram has."""
    return max(histogram.values(), default=0.0)


def quantile(histogram: dict[float, float], share: float) -> float:
    """The value below which so large a share lies, interpolated within its bucket as Prometheus does."""
    bounds = sorted(histogram.items())
    wanted = share * bounds[-1][1]
    for (below, fewer), (bound, more) in pairwise([(0.0, 0.0), *bounds]):
        if more >= wanted > fewer:
            return below if bound == float("inf") else below + (bound - below) * (wanted - fewer) / (more - fewer)
    return 0.0


def wrong_in_log(line: str) -> str:
    """What is wrong with a line of a log: errors, exceptions, and what is no line of a log. Empty if nothing is."""
    if not line:
        return ""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict):
        return line
    if entry.get("level") in ("ERROR", "CRITICAL") or "exception" in entry:
        return f"{entry.get('message')} {entry.get('exception', '')}".strip()
    return ""
