"""Time to the first token of a long prompt: chains of 1, 2 and 3 servers relative to the local transformers model.

    python -m benchmarks.decoding.prefill [--shapes tiny small] [--tokens 512] [--chunks auto whole 64]

Every server is a process with one torch thread; so is the local model. For each chain length, the local model and the
chain with each kind of chunking are measured alternately, so that other load on the machine affects all of them. `auto`
is the client's own chunking (`swarm.client.chain.prompt_chunks`), `whole` sends the prompt in one step, and a number is
the number of tokens per chunk.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.client import session
from swarm.transport.p2p import quiet_hivemind


@contextlib.contextmanager
def chunking(chunks: str) -> Iterator[None]:
    """Divide prompts into such chunks while the context is active."""
    if chunks == "auto":
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
    report: Report, shape: str, path: Path, local: PreTrainedModel, servers: int, tokens: int, ways: Sequence[str]
) -> None:
    """Milliseconds to the first token of one chain length for each kind of chunking, and of the local model."""
    random = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, SHAPES[shape].vocab_size, (1, tokens), generator=random)
    blocks = split_blocks(SHAPES[shape].num_hidden_layers, servers)
    with LocalSwarm(str(path), blocks, options=("--threads", "1", "--throughput", "1000")) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[swarm.address], wire="none")
        expected = local.generate(prompt, max_new_tokens=4, do_sample=False)
        for way in ways:
            with chunking(way):  # also warms up
                if not torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected):
                    raise SystemExit(f"{servers} servers, {way}: the tokens differ from the local model's")
        for _ in report.rounds(f"{shape}, servers: {servers}"):
            beside = first_token(local, prompt)
            for way in ways:
                where = f"{shape}, {tokens} tokens, servers: {servers}, chunks: {way}"
                with chunking(way):
                    seconds = first_token(model, prompt)
                report.add("ms to the first token", 1e3 * seconds, "less", where=where)
                report.add("local model, ms", 1e3 * beside, where=where)
                report.add("of the local time", seconds / beside, "less", decides=True, where=where)
        model.swarm.close()


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["tiny", "small"])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunks", nargs="+", default=["auto", "whole"])
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    with Report(arguments) as report:
        for shape in arguments.shapes:
            with tempfile.TemporaryDirectory() as folder:
                path = make_model(shape, Path(folder))
                local = AutoModelForCausalLM.from_pretrained(path)
                for servers in arguments.servers:
                    measure_chain(report, shape, path, local, servers, arguments.tokens, arguments.chunks)


if __name__ == "__main__":
    main()
