"""Time to the first token of a long prompt: chains of 1, 2 and 3 servers relative to the local transformers model.

    python -m benchmarks.decoding.prefill [--shapes tiny small] [--tokens 512] [--repeats 5] [--chunks auto whole 64]

Every server is a process with one torch thread; so is the local model. For each chain length, the local model and the
chain with each kind of chunking are measured alternately, so that other load on the machine affects all of them. `auto`
is the client's own chunking (`swarm.client.chain.prompt_chunks`), `whole` sends the prompt in one step, and a number is
the number of tokens per chunk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import machine
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.tables import spread
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.client import session
from swarm.transport.p2p import quiet_hivemind

CHAINS = (1, 2, 3)
LOCAL = "local"


@contextlib.contextmanager
def chunking(chunks: str) -> Iterator[None]:
    """Divide prompts into such chunks while the context is active."""
    if chunks in (LOCAL, "auto"):
        yield
        return

    def slots(slots: int, rows: int, servers: object, first_alone: bool) -> int:
        return slots if chunks == "whole" else max(1, int(chunks) // rows)

    with mock.patch.object(session, "chunk_slots", slots):
        yield


def first_token(model: PreTrainedModel, prompt: torch.Tensor) -> float:
    """Seconds from the prompt to its first token. A chain's session is opened before, as in a conversation."""
    if not hasattr(model, "swarm"):
        began = time.perf_counter()
        model.generate(prompt, max_new_tokens=1, do_sample=False)
        return time.perf_counter() - began
    with model.inference_session(max_length=prompt.shape[1] + 1) as one:
        one.open()
        began = time.perf_counter()
        model.generate(prompt, max_new_tokens=1, do_sample=False)
        return time.perf_counter() - began


def measure_chain(
    shape: str, path: Path, local: PreTrainedModel, servers: int, tokens: int, ways: Sequence[str], repeats: int
) -> dict[str, list[float]]:
    """Seconds to the first token of one chain length for each kind of chunking, and of the local model."""
    random = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, SHAPES[shape].vocab_size, (1, tokens), generator=random)
    blocks = split_blocks(SHAPES[shape].num_hidden_layers, servers)
    series: dict[str, list[float]] = {way: [] for way in (LOCAL, *ways)}
    with LocalSwarm(str(path), blocks, options=("--threads", "1", "--throughput", "1000")) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[swarm.address], wire="none")
        expected = local.generate(prompt, max_new_tokens=4, do_sample=False)
        for way in ways:
            with chunking(way):  # also warms up
                if not torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected):
                    raise SystemExit(f"{servers} servers, {way}: the tokens differ from the local model's")
        for _ in range(repeats):
            for way, seconds in series.items():
                with chunking(way):
                    seconds.append(first_token(local if way == LOCAL else model, prompt))
        model.swarm.close()
    return series


def table(shape: str, tokens: int, results: dict[int, dict[str, list[float]]]) -> str:
    """Format the results in Markdown."""
    lines = [
        f"shape {shape}, {tokens} tokens, fp32, greedy, batch 1; median (range)",
        "",
        "| servers | chunks | ms to the first token | local model, ms | of the local time |",
        "| --- | --- | --- | --- | --- |",
    ]
    for servers, series in results.items():
        beside = series[LOCAL]
        for way, seconds in series.items():
            if way != LOCAL:
                ratios = [one / other for one, other in zip(seconds, beside, strict=True)]
                columns = (spread([1e3 * s for s in seconds], 0), spread([1e3 * s for s in beside], 0), spread(ratios))
                lines.append(f"| {servers} | {way} | {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["tiny", "small"])
    parser.add_argument("--servers", type=int, nargs="+", default=list(CHAINS))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunks", nargs="+", default=["auto", "whole"])
    parser.add_argument("--json", type=Path, help="also write the raw results to this file")
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    about = machine.describe()
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    figures: dict[str, dict[int, dict[str, list[float]]]] = {}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(shape, Path(folder))
            local = AutoModelForCausalLM.from_pretrained(path)
            figures[shape] = {
                servers: measure_chain(
                    shape, path, local, servers, arguments.tokens, arguments.chunks, arguments.repeats
                )
                for servers in arguments.servers
            }
        print(table(shape, arguments.tokens, figures[shape]), end="\n\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "seconds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
