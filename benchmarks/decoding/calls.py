"""Calls of swarm's own functions that one decode token takes at the client and at the servers of its route.

    python -m benchmarks.decoding.calls [--servers 3] [--tokens 100] [--top 20]

Counted with `sys.setprofile` in all threads of all processes, between the first and the last of `--tokens` tokens of
the tiny shape, so that opening a session does not count.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

import torch

import swarm
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from swarm.cli.local_swarm import LocalSwarm, PeerProcess

PACKAGE = str(Path(swarm.__file__).parent)
WRITE_TIMEOUT_S = 30.0


class CallCounter:
    """Counts the calls of each function of `swarm` in this process."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            code = frame.f_code
            self.calls[f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}"] += 1

    def write(self, path: Path) -> None:
        """Write what was counted so far. A reader sees all of it or nothing."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.calls))
        part.rename(path)


def serve(path: Path, arguments: list[str]) -> None:
    """Run a server that writes its calls to `path` at each SIGUSR1."""
    counter = CallCounter()
    signal.signal(signal.SIGUSR1, lambda *_: counter.write(path))
    from swarm.server.__main__ import main as server_main

    server_main(arguments)


class CountedSwarm(LocalSwarm):
    """A swarm on this machine whose servers count their calls."""

    def __init__(self, model: Path, blocks: list[str]) -> None:
        super().__init__(str(model), blocks, options=("--threads", "1", "--throughput", "1000"))
        self._counts = tempfile.TemporaryDirectory()

    def add_server(self, blocks: str, *options: str) -> PeerProcess:
        server = super().add_server(blocks, *options)
        server.stop()
        path = Path(self._counts.name, str(len(self.servers)))
        arguments = ("benchmarks.decoding.calls", "--serve", str(path), *server.arguments[1:])
        self.servers[-1] = PeerProcess(arguments, self._environment)
        return self.servers[-1]

    def counts(self) -> list[collections.Counter[str]]:
        """The calls of each server so far."""
        found = []
        for number, server in enumerate(self.servers, 1):
            path = Path(self._counts.name, str(number))
            path.unlink(missing_ok=True)
            os.kill(server.pid, signal.SIGUSR1)
            deadline = time.monotonic() + WRITE_TIMEOUT_S
            while not path.exists():
                if time.monotonic() > deadline:
                    raise SystemExit(f"server {number} has not written its counts within {WRITE_TIMEOUT_S:.0f} s")
                time.sleep(0.01)
            found.append(collections.Counter(json.loads(path.read_text())))
        return found


def measure(servers: int, tokens: int) -> list[collections.Counter[str]]:
    """The calls of the client and of each server during `tokens` tokens."""
    counter = CallCounter()
    prompt = torch.ones(1, 8, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model("tiny", Path(folder))
        with CountedSwarm(path, split_blocks(SHAPES["tiny"].num_hidden_layers, servers)) as counted:
            model = swarm.AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[counted.address])
            with model.inference_session(max_length=2 * tokens + 64) as session:
                model.generate(prompt, max_new_tokens=tokens, past_key_values=session.cache)
                session.position = 0
                model.generate(prompt, max_new_tokens=8, past_key_values=session.cache)
                before = [collections.Counter(counter.calls), *counted.counts()]
                session.position = 0
                model.generate(prompt, max_new_tokens=8 + tokens, past_key_values=session.cache)
                after = [collections.Counter(counter.calls), *counted.counts()]
            model.swarm.close()
    return [one - other for one, other in zip(after, before, strict=True)]


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--top", type=int, default=20, help="how many of the functions are printed")
    arguments = parser.parse_args()
    counts = measure(arguments.servers, arguments.tokens)
    for name, one in zip(["client", *(f"server {n}" for n in range(1, len(counts)))], counts, strict=True):
        print(f"{name}: {one.total() / arguments.tokens:.0f} calls a token")
    both = sum(counts, collections.Counter())
    functions = [name for name, calls in both.items() if calls >= arguments.tokens / 2]
    modules = {name.split(":")[0] for name in functions}
    print(
        f"together: {both.total() / arguments.tokens:.0f} calls a token, "
        f"{len(functions)} functions, {len(modules)} modules"
    )
    for name, calls in both.most_common(arguments.top):
        print(f"  {calls / arguments.tokens:6.1f} {name}")


if __name__ == "__main__":
    main()
