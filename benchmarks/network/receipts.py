"""What receipts cost: a server's record of a session, step by step, and its signature.

    python -m benchmarks.network.receipts [--shape small] [--steps 300]

One server computes all blocks of a model, in this process; its client is here too, and both keep the record. In every
other step neither does, so that the two kinds of steps are compared within one run, pair by pair. A step's time is what
its client waits for the answer. The checksum of a step's inputs, which every reply has carried before, is in both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import uvloop

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model
from benchmarks.network.push import OneRoute, info_of
from swarm.client.chain.chain import Chain
from swarm.client.config import RequestOptions
from swarm.client.hops.hop_session import SessionContext
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Hop, Route, Span, StepLayout, WireFormat
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.loading.span_loading import load_span
from swarm.protocol.compression import encode_tensor
from swarm.protocol.input_checksum import LaterChecksum
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import Engine
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.session_table import SessionTable
from swarm.transport.identity import load_or_create
from swarm.trust.receipts import ServedBlocks, make_statement, sign_statement
from swarm.trust.session_record import SessionRecord, Totals
from tests.memory_hub import MemoryHub, MemoryNetwork

SIZES = (1, 16, 256)
"""Tokens of a step."""

Pairs = list[tuple[float, float]]
"""Seconds of a step with a record, and of its neighbor without."""


@contextmanager
def no_record() -> Iterator[None]:
    """Nothing is recorded meanwhile."""
    with (
        patch.object(SessionRecord, "add_step", lambda *_: None),
        patch.object(LaterChecksum, "compute_later", lambda *_: None),
    ):
        yield


async def measure(path: Path, steps: int) -> dict[int, Pairs]:
    """The times of steps, by their number of tokens."""
    hub = MemoryHub()
    checkpoint = open_checkpoint(str(path))
    span = Span(0, checkpoint.blocks)
    model = load_span(checkpoint, span, dtype=torch.float32, device=torch.device("cpu"))
    compute = ComputeThread()
    server, client = MemoryNetwork(hub, "server"), MemoryNetwork(hub, "client")
    sessions = SessionTable(1 << 20, time.monotonic)
    await server.serve(MessageHandler(server, model, checkpoint.revision, sessions, Engine(compute)))
    route = Route((Hop(info_of("server", span, checkpoint.revision), span),))
    found: dict[int, Pairs] = {}
    for tokens in SIZES:
        count = max(10, steps // tokens)
        options = RequestOptions(checkpoint.revision, WireFormat.NONE, 60.0, push=True)
        chain = Chain(SessionContext(client, OneRoute(route), options, span, 4096))
        await chain.open()

        async def step(position: int, tokens: int = tokens, chain: Chain = chain) -> float:
            hidden = encode_tensor(torch.randn(tokens, model.hidden_size), WireFormat.NONE)
            packed = PackedHidden(hidden, tokens, model.hidden_size, WireFormat.NONE, "float32")
            began = time.perf_counter()
            await chain.step(packed, StepLayout((position,), (tokens,)))
            return time.perf_counter() - began

        pairs: Pairs = []
        for number in range(count):
            position = number % 8 * 2 * tokens
            kinds = [False, True] if number % 2 else [True, False]
            seconds = {}
            for turn, kind in enumerate(kinds):
                if kind:
                    seconds[kind] = await step(position + turn * tokens)
                else:
                    with no_record():
                        seconds[kind] = await step(position + turn * tokens)
            pairs.append((seconds[True], seconds[False]))
        found[tokens] = pairs[len(pairs) // 10 :]
        await chain.close()
    compute.close()
    await hub.close()
    return found


def measure_signing(folder: Path) -> tuple[float, int]:
    """Median seconds of a signature, and the bytes of a receipt."""
    identity = load_or_create(folder / "identity")
    blocks = ServedBlocks.of(info_of(identity.peer_id, Span(0, 8), "main"), Span(0, 8))
    said = make_statement(identity.peer_id, "client", bytes(16), blocks, WireFormat.NONE, None, False, Totals(0))
    seconds, size = [], 0
    for _ in range(50):
        began = time.perf_counter()
        receipt = sign_statement(said, identity.sign)
        seconds.append(time.perf_counter() - began)
        size = len(receipt.statement) + len(receipt.public_key) + len(receipt.signature)
    return statistics.median(seconds), size


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Report(arguments) as report:
        path = make_model(arguments.shape, Path(folder))
        for tokens, pairs in uvloop.run(measure(path, arguments.steps)).items():
            for kept, plain in pairs:
                where = f"steps of {tokens} tokens"
                report.add("ms", 1e3 * kept, "less", where=where)
                report.add("more with a record, us", 1e6 * (kept - plain), "less", where=where)
                report.add("times as long", kept / plain, "less", decides=True, where=where)
        signing, size = measure_signing(Path(folder))
        report.add("ms, in a thread", 1e3 * signing, "less", where="a signature")
        report.add("bytes", size, "less", where="a receipt")


if __name__ == "__main__":
    main()
