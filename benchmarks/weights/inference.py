"""What an upload costs the clients of the server that sends: milliseconds a token, with an upload and without."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import Report
from benchmarks.common.shapes import SHAPES, make_model
from benchmarks.weights.links import LOOPBACK
from benchmarks.weights.peers import FetchOrder, PeerProcess
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder import BUSY_BYTES_PER_S

NOTHING, FROM_SERVER, FROM_ANOTHER = "nothing", "the server", "another process of the machine"
SENDERS = (NOTHING, FROM_SERVER, FROM_ANOTHER)
PROMPT = 8


def measure_inference(report: Report, shape: str, tokens: int, folder: Path) -> None:
    """A client generates while the server sends nothing, while it sends, and while another process sends as much.

    The last shows what receiving costs here, where it happens on the sender's own processors.
    """
    model_folder = make_model(shape, folder)
    spans = (f"0:{SHAPES[shape].num_hidden_layers}",)
    options = ("--threads", "1", "--throughput", "1000", "--share-weights", "on")
    with ExitStack() as ends:
        environment = {"XDG_CACHE_HOME": str(folder / "cache")}
        swarm = ends.enter_context(LocalSwarm(str(model_folder), spans, options=options, environment=environment))
        checkpoint = open_checkpoint(model_folder)
        digests = CheckpointParts(checkpoint).manifests().digests
        server_id = swarm.servers[0].address().rpartition("/p2p/")[2]
        other = PeerProcess(LOOPBACK)
        ends.callback(other.close)
        other.join().share(model_folder, checkpoint.name, BUSY_BYTES_PER_S)
        model: Any = AutoDistributedModelForCausalLM.from_pretrained(model_folder, initial_peers=[swarm.address])
        ends.callback(model.swarm.close)
        ids = torch.arange(PROMPT)[None]
        senders = {FROM_SERVER: (server_id, swarm.address), FROM_ANOTHER: (other.peer_id, other.address)}
        receivers = {}
        for name, (_, address) in senders.items():
            receivers[name] = PeerProcess(LOOPBACK).join(address)
            ends.callback(receivers[name].close)
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=tokens, do_sample=False)
            for number in report.rounds(f"{shape}, who sends"):
                milliseconds: dict[str, float] = {}
                # Whoever is last finds the machine as the others left it: each comes first as often.
                for name in SENDERS[number % len(SENDERS) :] + SENDERS[: number % len(SENDERS)]:
                    root = Path(tempfile.mkdtemp(dir=folder))
                    if name in senders:
                        order = FetchOrder(senders[name][0], root, checkpoint.name, checkpoint.revision, digests)
                        receivers[name].begin(order)
                    began = time.perf_counter()
                    model.generate(ids, max_new_tokens=tokens, do_sample=False)
                    seconds = time.perf_counter() - began
                    milliseconds[name] = 1e3 * seconds / tokens
                    if name in senders:
                        report.add("MB/s", receivers[name].stop() / seconds / 1e6, where=f"{name} sends")
                    shutil.rmtree(root)
                for name, taken in milliseconds.items():
                    report.add("ms a token", taken, "less", where=f"{name} sends")
                    if name in senders:
                        slower = 100 * (taken / milliseconds[NOTHING] - 1)
                        report.add("% slower than with nothing", slower, "less", where=f"{name} sends")
