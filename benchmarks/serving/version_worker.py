"""What `benchmarks.serving.versions` runs in each checkout. It uses only what all versions have.

version_worker.py model FOLDER              makes the model, and says where it is
version_worker.py swarm MODEL SERVERS       says the address of a swarm; ends with its standard input
version_worker.py client MODEL ADDRESS      says that it is ready; then answers each line `PROMPT NEW` with seconds
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm

SHAPE = "tiny"
OPTIONS = ("--threads", "1", "--throughput", "1000")


def run_swarm(model: str, servers: int) -> None:
    """Keep a chain of servers until the standard input ends."""
    with LocalSwarm(model, split_blocks(SHAPES[SHAPE].num_hidden_layers, servers), options=OPTIONS) as swarm:
        print(swarm.address, flush=True)
        sys.stdin.read()


def run_client(model_path: str, address: str) -> None:
    """Write a text for each line of the standard input."""
    model = AutoDistributedModelForCausalLM.from_pretrained(model_path, initial_peers=[address], wire="none")
    print("ready", flush=True)
    for line in sys.stdin:
        prompt, new = map(int, line.split())
        tokens = torch.randint(0, 1024, (1, prompt))
        began = time.perf_counter()
        model.generate(tokens, min_new_tokens=new, max_new_tokens=new, do_sample=False)
        print(time.perf_counter() - began, flush=True)
    model.swarm.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["model", folder]:
            print(make_model(SHAPE, Path(folder)), flush=True)
        case ["swarm", model, servers]:
            run_swarm(model, int(servers))
        case ["client", model, address]:
            run_client(model, address)
