"""Where the time of one token goes: what the client, each server and the network between them do, by microsecond.

    python -m benchmarks.decoding.timeline [--shape tiny] [--servers 3] [--tokens 200] [--picture FILE]
    python -m benchmarks.decoding.timeline --server FILE [arguments of swarm server]    a server that notes its moments

All processes read one clock. A moment is when a function begins or ends (`SERVER`, `CLIENT`); the table has the median
over all tokens of the time from the client's request to each moment, and from the moment before.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.tables import table
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.client.connection import SwarmConnection
from swarm.server.__main__ import main as serve
from swarm.server.compute import engine
from swarm.server.sessions.session_steps import SessionSteps
from swarm.transport.p2p import quiet_hivemind
from swarm.transport.stream import FrameStream

PROMPT_TOKENS = 16

BLUE, DARK, LIGHT = "#2f6fdf", "#8a8f98", "#cfd6e4"

SERVER = {
    "bytes arrive": (asyncio.StreamReader, "feed_data", "begin"),
    "message decoded": (SessionSteps, "run_step", "begin"),
    "request queued": (engine.Engine, "submit", "begin"),
    "products begin": (engine, "_advance_together", "begin"),
    "products end": (engine, "_advance_together", "end"),
    "result encoded": (engine, "_finish_computation", "end"),
    "outputs written": (FrameStream, "send", "end"),
}
CLIENT = {
    "request": (SwarmConnection, "run", "begin"),
    "written": (FrameStream, "send", "end"),
    "answer arrives": (asyncio.StreamReader, "feed_data", "begin"),
    "outputs returned": (SwarmConnection, "run", "end"),
}

Moments = list[tuple[str, float]]
"""What happened, and when, in seconds."""


def watch(functions: dict[str, tuple[Any, str, str]]) -> Moments:
    """Note from now on when these functions begin or end."""
    found: Moments = []
    clock = time.perf_counter

    def wrap(function: Callable[..., Any], name: str, edge: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def noted_later(*args: Any, **kwargs: Any) -> Any:
                began = clock()
                result = await function(*args, **kwargs)
                found.append((name, began if edge == "begin" else clock()))
                return result

            return noted_later

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            result = function(*args, **kwargs)
            found.append((name, began if edge == "begin" else clock()))
            return result

        return noted

    for name, (owner, attribute, edge) in functions.items():
        setattr(owner, attribute, wrap(getattr(owner, attribute), name, edge))
    return found


def run_server(file: Path) -> None:
    """Serve until SIGTERM, then write what was noted."""
    found = watch(SERVER)
    try:
        serve()
    finally:
        file.write_text(json.dumps(found))


def measure(shape: str, servers: int, tokens: int) -> dict[str, float]:
    """For each moment, in their order, seconds from the client's request; medians over the tokens."""
    torch.set_num_threads(1)
    prompt = torch.randint(0, 1024, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(shape, Path(folder))
        files = [Path(folder) / f"{number}.json" for number in range(servers)]
        with ExitStack() as ends:
            processes: list[PeerProcess] = []
            for file, blocks in zip(files, split_blocks(SHAPES[shape].num_hidden_layers, servers), strict=True):
                where = ("--initial-peers", processes[0].address()) if processes else ("--new-swarm",)
                options = ("--blocks", blocks, *where, "--host-maddrs", LOOPBACK, "--threads", "1")
                arguments = ("benchmarks.decoding.timeline", "--server", str(file), str(path), *options)
                processes.append(PeerProcess((*arguments, "--throughput", "1000")))
                ends.callback(processes[-1].stop)
            for process in processes:
                process.address()
            initial_peers = [processes[0].address()]
            model: Any = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=initial_peers, wire="none")
            ends.callback(model.swarm.close)
            model.generate(prompt, max_new_tokens=tokens, do_sample=False)
            own = watch(CLIENT)
            model.generate(prompt, max_new_tokens=tokens, do_sample=False)
        return merge(own, [json.loads(file.read_text()) for file in files])


def merge(client: Moments, servers: list[Moments]) -> dict[str, float]:
    """The moments of all processes, from one request of the client to the next."""
    found: dict[str, list[float]] = {}
    requests = [when for name, when in client if name == "request"]
    for begin, end in itertools.pairwise(requests[1:]):  # not the prompt
        own = [(name, when) for name, when in client if begin <= when < end]
        answered = next((when for name, when in own if name == "outputs returned"), None)
        if answered is None:
            continue
        moments = {"client: request": begin, "client: outputs returned": answered, "client: next request": end}
        moments["client: written"] = next(when for name, when in own if name == "written")
        # Copies of what the servers hand each other come before.
        moments["client: answer arrives"] = max(w for name, w in own if name == "answer arrives" and w < answered)
        for number, there in enumerate(servers, 1):
            for name, when in reversed(there):
                if begin <= when < end and name in SERVER:
                    moments[f"server {number}: {name}"] = when  # the first one stays
        for name, when in moments.items():
            found.setdefault(name, []).append(when - begin)
    usual = {name: statistics.median(times) for name, times in found.items() if 2 * len(times) > len(requests)}
    return dict(sorted(usual.items(), key=lambda one: one[1]))


def rows(found: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """For the table: each moment, milliseconds from the request, and from the moment before."""
    times = [0.0, *found.values()]
    return [
        (name, f"{1e3 * when:.2f}", f"{1e3 * (when - times[at]):.2f}") for at, (name, when) in enumerate(found.items())
    ]


def draw(found: Mapping[str, float], shape: str, path: Path) -> None:
    """One line for each process: what it does, and when; between them the network."""
    lanes = list(dict.fromkeys(name.partition(":")[0] for name in found))
    figure = Figure(figsize=(9, 0.5 * len(lanes) + 1.1), layout="constrained")
    axis = figure.subplots()
    for (_, began), (name, ended) in itertools.pairwise(found.items()):
        lane, _, moment = name.partition(": ")
        arrives = moment in ("bytes arrive", "answer arrives")
        color = LIGHT if arrives else BLUE if moment == "products end" else DARK
        axis.barh(lanes.index(lane), 1e3 * (ended - began), left=1e3 * began, color=color, height=0.6)
    axis.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"ms of one token, {shape}", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    kinds = (("blocks", BLUE), ("all else that a process does", DARK), ("on the way to it", LIGHT))
    handles = [Patch(color=color, label=name) for name, color in kinds]
    axis.legend(handles=handles, fontsize=8, loc="lower left", frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--picture", type=Path, help="draw it into this file")
    arguments = parser.parse_args()
    quiet_hivemind()
    found = measure(arguments.shape, arguments.servers, arguments.tokens)
    print(table(("moment", "ms", "since the one before"), rows(found)))
    if arguments.picture:
        draw(found, arguments.shape, arguments.picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        sys.argv.pop(1)
        run_server(Path(sys.argv.pop(1)))
    else:
        main()
