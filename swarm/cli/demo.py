"""`swarm demo`: three server processes write a text together, and the same model alone confirms every token."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType
from typing import Any

import click

from swarm.cli.local_swarm import LocalSwarm
from swarm.common import console

SPANS = ("0:4", "4:8", "8:12")
PROMPT = "Once upon a time"


@click.command(name="demo")
@click.option("--prompt", default=PROMPT, show_default=True, help="How the text begins.")
@click.option("--tokens", type=click.IntRange(1, 900), default=120, show_default=True, help="Tokens to write.")
@click.option("--temperature", type=click.FloatRange(0, 5), default=0.7, show_default=True, help="0 for greedy.")
@click.option("--seed", type=int, default=11, show_default=True)
@console.exit_codes
def main(prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Start a swarm on this machine, let it write, compare with the model run locally, and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background jobs are born ignoring it
        signal.signal(number, _interrupt)
    click.echo("Starting a bootstrap peer and three servers on this machine ...")
    try:
        # One thread a process: four processes share a small machine better that way.
        with LocalSwarm(
            None, SPANS, options=("--threads", "1"), starting=lambda line: click.echo(f"  {line}")
        ) as swarm:
            for server in swarm.servers:
                peer = server.wait_for(r"^Peer: (\S+),")[1]
                span = server.wait_for(r"^Blocks: (\S+),")[1]
                click.echo(f"  server …{peer[-6:]} holds blocks {span} (process {server.pid})")
            _write(swarm.address, prompt, tokens, temperature, seed)
    except KeyboardInterrupt:
        click.echo("\nInterrupted; all processes of the demo are ended.", err=True)
        raise


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _write(address: str, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    import torch

    from swarm.client.auto_model import AutoDistributedModelForCausalLM
    from swarm.data_structures import WireFormat
    from swarm.models.checkpoints.checkpoint import DEMO
    from swarm.models.checkpoints.tokenizer import TextStreamer, load_local_model, load_tokenizer
    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(DEMO)
    # Exactly as computed: what the usual format rounds off would now and then change a token.
    model = AutoDistributedModelForCausalLM.from_pretrained(initial_peers=[address], wire=WireFormat.NONE)
    click.echo(_what_travels(model.config))
    try:
        inputs = tokenizer(prompt, return_tensors="pt")
        settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0}
        if temperature > 0:
            settings |= {"temperature": temperature, "top_k": 50}
        with model.inference_session(max_length=inputs["input_ids"].shape[1] + tokens) as session:
            click.echo(f"{session.open()}\n")
            torch.manual_seed(seed)
            began = time.perf_counter()
            written = model.generate(**inputs, **settings, streamer=TextStreamer(tokenizer))
            seconds = time.perf_counter() - began
    finally:
        model.swarm.close()
    count = written.shape[1] - inputs["input_ids"].shape[1]
    click.echo(f"\n{count} tokens in {seconds:.2f} s: {count / seconds:.0f} tokens/s through three servers")

    torch.manual_seed(seed)
    local = load_local_model(DEMO)
    began = time.perf_counter()
    alone = local.generate(**inputs, **settings)
    seconds = time.perf_counter() - began
    click.echo(f"The same model alone, in one process: {count / seconds:.0f} tokens/s")
    if not torch.equal(written, alone):
        click.echo("The tokens DIFFER from the local model's. This is a bug: please report it.", err=True)
        sys.exit(1)
    click.echo(f"All {count} tokens equal the local model's.")


def _what_travels(config: Any) -> str:
    from swarm.data_structures import WireFormat
    from swarm.models.wire_defaults import default_wire
    from swarm.protocol.compression import dtype_name, payload_length

    usual, dtype = default_wire(config), dtype_name(config.dtype)
    exact, rounded = (payload_length(config.hidden_size, wire, dtype) for wire in (WireFormat.NONE, usual))
    return (
        f"  hidden states travel as computed (wire=none), {exact} bytes a token, so that tokens can be compared; "
        f"the model's default, {usual}, takes {rounded}"
    )
