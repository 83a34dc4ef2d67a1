"""`python -m swarm.server`, also `swarm server`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.common.units import ByteSize
from swarm.errors import InvalidOption

if TYPE_CHECKING:  # torch and transformers load only once the options are known to be right
    from swarm.server.lifecycle import Server

logger = logging.getLogger("swarm.server")


@click.command(name="server", cls=console.MultiAddressCommand, context_settings={"show_default": True})
@click.argument("model", required=False)
@click.option("--revision", help="Branch, tag or commit of a model from the hub.")
@click.option(
    "--blocks",
    default="auto",
    metavar="auto|START:END|COUNT",
    help="Which blocks to serve. auto: as many as fit, where the swarm is weakest.",
)
@console.initial_peers_option
@click.option("--new-swarm", is_flag=True, help="Start a swarm of one's own instead of joining one.")
@console.network_options(default_port=0)
@click.option("--device", default="auto", help="Torch device such as cpu or cuda:0.")
@click.option("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16 or float16.")
@click.option(
    "--quant",
    type=click.Choice(["auto", "none", "int8", "nf4"]),
    default="auto",
    help="Weights in 8 or 4 bits. auto: none if the blocks fit, else int8. "
    "On a CPU nf4 is held as int4 (16 evenly spaced values a group), and announced so.",
)
@click.option(
    "--throughput",
    default="auto",
    help="Blocks this server computes for one token, per second. auto: measured once and remembered; measure: again.",
)
@click.option("--stay", is_flag=True, help="Never move to other blocks, even where the swarm needs this server more.")
@click.option("--name", default="", help="Name to show to others.")
@click.option("--cache-tokens", type=click.IntRange(1, 2**40), help="Room in the attention cache.  [default: 16384]")
@click.option(
    "--adapters",
    multiple=True,
    metavar="FOLDER|REPO",
    help="LoRA or deep prompts in PEFT's format that every client may use; may be repeated.",
)
@click.option(
    "--adapter-memory",
    metavar="SIZE",
    help="Room for adapters of clients, such as 2GB.  [default: a twentieth of the free memory, 1 GiB at most]",
)
@click.option(
    "--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="Where files from the hub are kept."
)
@click.option("--update-period", type=click.FloatRange(1, 200), default=30.0, help="Seconds between announcements.")
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Compile the blocks for decoding: quicker steps of small blocks, for half a minute once and a C++ compiler.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Torch threads.  [default: torch's choice]")
@console.metrics_option
@console.log_format_option
@console.exit_codes
def main(
    model: str | None,
    revision: str | None,
    blocks: str,
    initial_peers: tuple[str, ...],
    new_swarm: bool,
    host_maddrs: tuple[str, ...],
    announce_maddrs: tuple[str, ...],
    identity_path: Path | None,
    device: str,
    dtype: str,
    quant: str,
    throughput: str,
    stay: bool,
    name: str,
    cache_tokens: int | None,
    adapters: tuple[str, ...],
    adapter_memory: str | None,
    cache_dir: Path | None,
    update_period: float,
    compiled: bool,
    threads: int | None,
    metrics: str | None,
    log_format: str,
) -> None:
    """Serve blocks of MODEL: a local folder, a model's name on the hub, or nothing for the demo model."""
    peers = console.split(initial_peers)
    if bool(peers) == new_swarm:
        raise InvalidOption(
            "say which swarm to serve: --initial-peers ADDRESS... joins one "
            f"({console.INITIAL_PEERS_VARIABLE} stands in for it), --new-swarm starts one"
        )
    from swarm.metrics.endpoint import MetricsAddress
    from swarm.server.config import BlocksOption, ServerConfig
    from swarm.server.throughput.throughput_cache import default_path
    from swarm.server.throughput.throughput_option import ThroughputOption
    from swarm.transport.p2p import P2PConfig, quiet_hivemind

    wanted = BlocksOption.parse(blocks)
    rate = ThroughputOption.parse(throughput)
    address = MetricsAddress.parse(metrics) if metrics is not None else None
    remembered = default_path()
    console.log_lines(log_format)
    quiet_hivemind()
    _use_huge_pages()
    config = ServerConfig(
        model=model,
        revision=revision,
        blocks=wanted,
        p2p=P2PConfig(
            initial_peers=peers,
            host_maddrs=console.split(host_maddrs),
            announce_maddrs=console.split(announce_maddrs),
            identity_path=identity_path,
        ),
        device=device,
        dtype=dtype,
        quant=quant,
        throughput=rate,
        throughput_cache=remembered,
        compile_in=remembered.parent / "compiled" if compiled and remembered is not None else None,
        stay=stay,
        name=name,
        cache_tokens=cache_tokens,
        adapters=adapters,
        adapter_memory=_size("--adapter-memory", adapter_memory),
        cache_dir=cache_dir,
        update_period=update_period,
        threads=threads,
        metrics=address,
    )

    import uvloop

    from swarm.server.lifecycle import Server

    uvloop.run(_serve(Server(config), model, peers))


async def _serve(server: Server, model: str | None, peers: tuple[str, ...]) -> None:
    """Run until SIGINT or SIGTERM, also while the server is still starting."""
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave.set)
    leaving = asyncio.create_task(leave.wait())
    starting = asyncio.create_task(server.start())
    await asyncio.wait({leaving, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return
    starting.result()
    # What is loaded stays: without the million objects of the imports, collecting garbage costs a server nothing.
    gc.collect()
    gc.freeze()
    addresses = await server.peer.visible_addresses()
    for line in how_to_join(model, (*addresses, *peers)):
        logger.info("%s", line)
    lost = asyncio.create_task(server.lost())
    await asyncio.wait({leaving, lost}, return_when=asyncio.FIRST_COMPLETED)
    error = lost.result() if lost.done() else None  # before the daemon is ended in an orderly way
    lost.cancel()
    logger.info("Leaving the swarm")
    await server.stop()
    if error is not None:
        raise error


def _size(option: str, text: str | None) -> int | None:
    try:
        return ByteSize.read(text) if text is not None else None
    except ValueError as error:
        raise InvalidOption(f"{option}: {error}") from None


def _use_huge_pages() -> None:
    """Have torch ask Linux for huge pages: weights are read a tenth quicker. To be said before its first tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def how_to_join(model: str | None, addresses: tuple[str, ...]) -> tuple[str, str]:
    """The two lines that the next person needs: a command that joins, and a client's first line."""
    first = addresses[0]
    named = f" {model}" if model else ""
    argument = repr(model) + ", " if model else ""
    return (
        f"Join:   swarm server{named} --initial-peers {first}",
        f"Client: swarm.AutoDistributedModelForCausalLM.from_pretrained({argument}initial_peers=[{first!r}])",
    )


if __name__ == "__main__":
    main(prog_name="python -m swarm.server")
