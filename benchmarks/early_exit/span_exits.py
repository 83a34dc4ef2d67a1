"""Exits inside a server's span: tokens a second against the share of blocks that is skipped, and of tokens that leave.

    python -m benchmarks.early_exit.span_exits [--shape small] [--confidences similarity,softmax,classifier]
        [--skipped 0.25,0.5,0.75] [--leaving 0,0.25,0.5,0.75,1] [--tokens 16] [--repeats 15] [--json FILE]

One server, with everything but libp2p, holds a model of random weights, and one client sends it token after token. The
client decides which tokens leave: by a threshold of 0, which they all exceed, or of 1, which none does. So a row's
tokens leave evenly spread, and the classifier need not be trained. Each row has a session and an exit of its own; all
take turns with plain decoding.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model
from swarm.data_structures import ExitConfidence, Span, WireFormat
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import choose_exit_forwards, choose_forward
from swarm.models.exits.model_head import ModelHead
from swarm.models.exits.span_exits import SpanExits
from swarm.models.exits.trained_exits import BaseModel, ExitClassifier, TrainedExits
from swarm.models.loading.span_loading import load_span
from swarm.protocol import messages
from swarm.protocol.compression import encode_tensor
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import Engine
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.session_table import SessionTable
from tests.memory_hub import MemoryHub, MemoryNetwork

CPU = torch.device("cpu")
PROMPT_TOKENS = 64


@dataclass
class Row:
    """One way to decode.

    Attributes:
        model: what the server holds.
        terms: what its client asks for when a token leaves, and when none does; None for plain decoding.
        tokens: share that leaves.
    """

    name: Sequence[str]
    model: SpanModel
    terms: tuple[messages.ExitTerms, messages.ExitTerms] | None = None
    tokens: float = 0.0

    def exits_of(self, number: int) -> messages.ExitTerms | None:
        """What the client asks for in a step."""
        return self.terms[0 if self.leaves(number) else 1] if self.terms is not None else None

    def leaves(self, number: int) -> bool:
        """Whether the token of a step leaves."""
        return int((number + 1) * self.tokens) > int(number * self.tokens)


async def decode(row: Row, steps: int) -> float:
    """Seconds that a session's steps take, behind a prompt."""
    hub, compute_thread = MemoryHub(), ComputeThread()
    model = row.model
    network = MemoryNetwork(hub, "server")
    handler = MessageHandler(
        network, model, "main", SessionTable(4096, time.monotonic), Engine(compute_thread, PROMPT_TOKENS)
    )
    await network.serve(handler)
    stream = await MemoryNetwork(hub, "client").open_stream("server")

    async def ask(message: messages.Message, payload: Any = b"") -> messages.ServerMessage:
        await stream.send(message, payload)
        return messages.decode_server((await stream.receive()).header)

    def step(number: int, start: int, tokens: int, exits: messages.ExitTerms | None) -> messages.StepRequest:
        return messages.StepRequest(number, [start], [tokens], WireFormat.NONE, "float32", exits=exits)

    try:
        length, span = PROMPT_TOKENS + steps, model.span
        await ask(
            messages.OpenSession(
                bytes(16), "main", span.start, span.end, length, WireFormat.NONE, early_exits=row.terms is not None
            )
        )
        hidden = torch.randn(length, model.hidden_size)
        await ask(step(0, 0, PROMPT_TOKENS, None), encode_tensor(hidden[:PROMPT_TOKENS], WireFormat.NONE))
        began = time.perf_counter()
        for number in range(steps):
            request = step(number + 1, PROMPT_TOKENS + number, 1, row.exits_of(number))
            reply = await ask(request, encode_tensor(hidden[PROMPT_TOKENS + number :][:1], WireFormat.NONE))
            if not isinstance(reply, messages.StepReply) or (reply.left is not None) != row.leaves(number):
                raise SystemExit(f"{row.name}: token {number} did not do as it was told: {reply}")
        return time.perf_counter() - began
    finally:
        compute_thread.close()
        await hub.close()


def rows(
    checkpoint: Checkpoint,
    confidences: Sequence[ExitConfidence],
    block_shares: Sequence[float],
    token_shares: Sequence[float],
) -> list[Row]:
    """Plain decoding, then all shares of skipped blocks and of tokens that leave, by each confidence."""
    blocks = checkpoint.blocks
    plain = choose_forward(load_span(checkpoint, Span(0, blocks), dtype=torch.float32, device=CPU))
    head = ModelHead(checkpoint, torch.float32, CPU)
    found = [Row(("none", "", ""), plain)]
    for skipped in block_shares:
        exit_block = blocks - int(skipped * blocks)
        classifier = ExitClassifier(torch.zeros(plain.hidden_size), torch.zeros(1))  # a half
        trained = TrainedExits(BaseModel("", "", plain.hidden_size, blocks), {}, {exit_block: classifier})
        model = plain.with_exits(SpanExits((exit_block,), head, trained))
        choose_exit_forwards(model)
        for confidence in confidences:
            leave, stay = (messages.ExitTerms(confidence, ((exit_block, one),)) for one in (0.0, 1.0))
            found += [
                Row((confidence, f"{skipped:.0%}", f"{tokens:.0%}"), model, (leave, stay), tokens)
                for tokens in token_shares
            ]
    return found


def main() -> None:
    parser = report_parser(__doc__, repeats=15)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--confidences", default="similarity,softmax,classifier")
    parser.add_argument("--skipped", default="0.25,0.5,0.75", help="shares of the blocks")
    parser.add_argument("--leaving", default="0,0.25,0.5,0.75,1", help="shares of the tokens")
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Report(arguments) as report:
        checkpoint = open_checkpoint(make_model(arguments.shape, Path(folder)))
        shares = [[float(share) for share in one.split(",")] for one in (arguments.skipped, arguments.leaving)]
        found = rows(checkpoint, arguments.confidences.split(","), *shares)
        for row in found:
            asyncio.run(decode(row, 4))
        for _ in report.rounds(f"{arguments.shape}: confidence, blocks skipped, by tokens"):
            seconds = [asyncio.run(decode(row, arguments.tokens)) for row in found]
            for row, taken in zip(found, seconds, strict=True):
                where = ", ".join(filter(None, row.name))
                report.add("tokens/s", arguments.tokens / taken, "more", where=where)
                report.add("times plain", seconds[0] / taken, "more", decides=True, where=where)


if __name__ == "__main__":
    main()
