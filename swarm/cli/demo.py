"""`swarm demo`: three server processes generate a text together, and a local copy of the model checks every token.

With `--serve` they go on, for people to try: with a chat page and OpenAI's interface.
"""

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
TOKENS = 120
SEED = 11


@click.command(name="demo", context_settings={"show_default": True})
@click.option(
    "--serve", is_flag=True, help="Serve a chat page and OpenAI's interface until Ctrl-C, and compare nothing."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="With --serve: 0 takes any free port.")
@console.errors_to_exit_codes
def main(serve: bool, port: int) -> None:
    """Start a swarm on this machine, generate a text, compare it with the local model's, and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background jobs start with it ignored
        signal.signal(number, _interrupt)
    click.echo("Starting a bootstrap peer and three servers on this machine ...")
    try:
        # One thread per process: four processes share a small machine better that way.
        with LocalSwarm(
            None, SPANS, options=("--threads", "1"), on_start=lambda line: click.echo(f"  {line}")
        ) as swarm:
            for server in swarm.servers:
                peer = server.wait_for(r"^Peer: (\S+),")[1]
                span = server.wait_for(r"^Blocks: (\S+),")[1]
                click.echo(f"  server …{peer[-6:]} holds blocks {span} (process {server.pid})")
            if serve:
                _serve(swarm.address, port)
            else:
                _generate_and_compare(swarm.address)
    except KeyboardInterrupt:
        click.echo("\nInterrupted; all processes of the demo have ended.", err=True)
        raise


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _serve(address: str, port: int) -> None:
    import torch

    from swarm.gateway.lifecycle import ListenAddress, serve_gateway
    from swarm.gateway.settings import GatewaySettings
    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    torch.set_num_threads(1)
    serve_gateway(
        [None],
        {"initial_peers": [address]},
        GatewaySettings(),
        None,
        ListenAddress("127.0.0.1", port),
        with_monitor=True,
        on_ready=_say_where,
    )


def _say_where(url: str) -> None:
    click.echo(
        f"\nChat in your browser:  {url}\nOpenAI's interface:    {url}v1\nThe swarm:             {url}monitor/\n"
        "The model is tiny: it writes English in the manner of old books, and knows nothing. Ctrl-C ends the demo."
    )


def _generate_and_compare(address: str) -> None:
    import torch

    from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
    from swarm.data_structures import WireFormat
    from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
    from swarm.models.checkpoints.partial_loading import TextStreamer, load_local_model
    from swarm.models.tokenizers.tokenizer import load_tokenizer
    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(DEMO_FOLDER)
    # Send hidden states exactly as computed: the default format rounds them, which would change a token now and then.
    model = AutoDistributedModelForCausalLM.from_pretrained(initial_peers=[address], wire=WireFormat.NONE)
    click.echo(_describe_wire_format(model.config))
    try:
        inputs = tokenizer(PROMPT, return_tensors="pt")
        settings: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": 0.7, "top_k": 50}
        with model.inference_session(max_length=inputs["input_ids"].shape[1] + TOKENS) as session:
            click.echo(f"{session.open()}\n")
            torch.manual_seed(SEED)
            began = time.perf_counter()
            generated = model.generate(**inputs, **settings, streamer=TextStreamer(tokenizer))
            seconds = time.perf_counter() - began
    finally:
        model.swarm.close()
    count = generated.shape[1] - inputs["input_ids"].shape[1]
    click.echo(f"\n{count} tokens in {seconds:.2f} s: {count / seconds:.0f} tokens/s through three servers")

    torch.manual_seed(SEED)
    local = load_local_model(DEMO_FOLDER)
    began = time.perf_counter()
    expected = local.generate(**inputs, **settings)
    seconds = time.perf_counter() - began
    click.echo(f"The same model alone, in one process: {count / seconds:.0f} tokens/s")
    if not torch.equal(generated, expected):
        click.echo("The tokens DIFFER from the local model's. This is a bug: please report it.", err=True)
        sys.exit(1)
    click.echo(f"All {count} tokens equal the local model's.")


def _describe_wire_format(config: Any) -> str:
    from swarm.common.dtypes import dtype_name
    from swarm.data_structures import WireFormat
    from swarm.models.wire_defaults import default_wire_format
    from swarm.protocol.compression import payload_bytes

    default, dtype = default_wire_format(config), dtype_name(config.dtype)
    exact, rounded = (payload_bytes(config.hidden_size, wire, dtype) for wire in (WireFormat.NONE, default))
    return (
        f"  hidden states travel as computed (wire=none), {exact} bytes a token, so that tokens can be compared; "
        f"the model's default, {default}, takes {rounded}"
    )
