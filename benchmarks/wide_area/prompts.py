"""The first token of a long prompt over thin links: chunks as links want them, and as servers alone would have them.

    python -m benchmarks.wide_area.prompts [--shape small] [--servers 4] [--rates 4,14,100] [--tokens 1024]

Servers measure what they compute, and the links between them, and announce both. Each link carries so many Mbit/s, with
25 ms one way. Both ways of cutting take turns.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.slow_network import slow_network
from swarm.client import session
from swarm.client.chain import prompt_chunks
from swarm.transport.p2p import quiet_hivemind

DELAY_MS = 25
MEASURE_TIMEOUT_S = 120.0


def wait_for_links(model: Any, servers: int) -> float:
    """Wait until all links are measured: the cost of carrying a token, in tokens that the slowest server computes."""
    deadline = time.monotonic() + MEASURE_TIMEOUT_S
    while True:
        known = [one for one in model.swarm.servers() if one.network_throughput]
        if len(known) >= servers:
            return prompt_chunks.carry_cost(known)
        if time.monotonic() > deadline:
            raise SystemExit(f"only {len(known)} of {servers} servers have measured their links")
        time.sleep(1)


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default="4,14,100")
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet_hivemind()
    with tempfile.TemporaryDirectory() as name, Report(arguments) as report:
        folder = Path(name)
        path = make_model(arguments.shape, folder)
        spans = split_blocks(SHAPES[arguments.shape].num_hidden_layers, arguments.servers)
        for rate in arguments.rates:
            profile = folder / f"{rate:g}.json"
            links = {"same_city_ms": 2 * DELAY_MS, "access_ms": 0, "rate_mbit": rate}
            machines = {"machines": ["anywhere"] * (1 + len(spans)), "round_trip_ms": {}}
            profile.write_text(json.dumps({**machines, **links}))
            with slow_network(path, spans, profile, throughput="auto") as model:
                carry = wait_for_links(model, len(spans))
                prompt_1T = torch.randint(model.config.vocab_size, (1, arguments.tokens))

                def first_token(thin: bool, model: Any = model, prompt_1T: torch.Tensor = prompt_1T) -> float:
                    way = nullcontext() if thin else mock.patch.object(prompt_chunks, "carry_cost", return_value=0.0)
                    with way, model.inference_session(max_length=arguments.tokens + 1):
                        began = time.perf_counter()
                        model.generate(prompt_1T, max_new_tokens=1, do_sample=False)
                        return time.perf_counter() - began

                chunk = session.chunk_slots(arguments.tokens, 1, model.swarm.servers())
                where = f"{rate:g} Mbit/s, carry / compute {carry:.2f}, {chunk} tokens a chunk"
                first_token(False), first_token(True)  # warms up
                for _ in report.rounds(where):
                    plain, thin = first_token(False), first_token(True)
                    report.add("for servers, s", plain)
                    report.add("for links too, s", thin, "less")
                    report.add("times", thin / plain, "less", decides=True)


if __name__ == "__main__":
    main()
