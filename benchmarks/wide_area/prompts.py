"""The first token of a long prompt over thin links: chunks as links want them, and as servers alone would have them.

    python -m benchmarks.wide_area.prompts [--shape small] [--servers 4] [--rates 4,14,100] [--tokens 1024]

Servers measure what they compute, and the links between them, and announce both. Each link carries so many Mbit/s, with
25 ms one way. Both ways of cutting take turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import machine
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.slow_network import slow_network
from benchmarks.common.tables import spread, table, times
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default="4,14,100")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet_hivemind()
    print(", ".join(machine.describe().values()))
    rows = []
    with tempfile.TemporaryDirectory() as name:
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
                found: dict[bool, list[float]] = {True: [], False: []}
                prompt_1T = torch.randint(model.config.vocab_size, (1, arguments.tokens))
                for number in range(2 * (1 + arguments.repeats)):
                    thin = bool(number % 2)
                    way = nullcontext() if thin else mock.patch.object(prompt_chunks, "carry_cost", return_value=0.0)
                    with way, model.inference_session(max_length=arguments.tokens + 1):
                        began = time.perf_counter()
                        model.generate(prompt_1T, max_new_tokens=1, do_sample=False)
                        if number > 1:  # the first ones warm up
                            found[thin].append(time.perf_counter() - began)
                chunk = session.chunk_slots(arguments.tokens, 1, model.swarm.servers())
            ratio = times(found[True], found[False])
            rows.append((f"{rate:g}", f"{carry:.2f}", str(chunk), spread(found[False]), spread(found[True]), ratio))
    heading = ("Mbit/s", "carry / compute", "tokens a chunk", "for servers, s", "for links too, s", "times")
    print(table(heading, rows))


if __name__ == "__main__":
    main()
