"""`python -m swarm.server`, also `swarm server`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from swarm.common import console
from swarm.errors import InvalidOption

if TYPE_CHECKING:  # torch and transformers are imported only once the options are known to be valid
    from swarm.server.config import ServerConfig
    from swarm.server.lifecycle import Server

logger = logging.getLogger("swarm.server")

OPTIONS_AS_GIVEN = (
    *("model", "revision", "device", "dtype", "quant", "stay", "name"),
    *("cache_tokens", "adapters", "cache_dir", "update_period", "threads"),
    *("flash_exact", "exits_from", "vouchers"),
)
"""Options that go into `ServerConfig` as they are."""


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
@console.membership_option
@click.option("--new-swarm", is_flag=True, help="Start a new swarm instead of joining one.")
@console.network_options(default_port=0)
@click.option("--device", default="auto", help="Torch device such as cpu or cuda:0.")
@click.option("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16 or float16.")
@click.option(
    "--quant",
    type=click.Choice(["auto", "none", "packed", "int8", "nf4"]),
    default="auto",
    help="Hold the weights in 8 or 4 bits. packed: as a packed checkpoint has them. auto: none if the blocks fit, else "
    "packed or int8. "
    "On a CPU, nf4 is held and announced as int4 (16 evenly spaced values for each group); a GPU needs bitsandbytes.",
)
@click.option(
    "--flash",
    default="auto",
    metavar="auto|off|SIZE",
    help="Keep weights on a drive, and only SIZE of them in memory (docs/flash.md). auto: if the blocks do not fit in "
    "memory. On CPUs, without quantization.",
)
@click.option(
    "--flash-exact",
    is_flag=True,
    help="Read all weights of each block. Otherwise, blocks of which a token needs few neurons are approximate.",
)
@click.option(
    "--exits",
    metavar="all|BLOCK,...",
    help="Let tokens of clients that ask for it leave in front of these blocks (docs/early-exit.md). Loads the model's "
    "final norm and head too.",
)
@click.option(
    "--exits-from",
    type=click.Path(file_okay=False, path_type=Path),
    help="Lenses and classifiers for --exits, in the folder of model.save_exits.",
)
@click.option(
    "--throughput",
    default="auto",
    help="Blocks that this server computes per second for one token. auto: measure at each start.",
)
@click.option("--stay", is_flag=True, help="Never move to other blocks, even where the swarm needs this server more.")
@click.option("--name", default="", help="Name that others see.")
@click.option(
    "--cache-tokens",
    type=click.IntRange(1, 2**40),
    help="Capacity of the attention cache, in tokens.  [default: 16384]",
)
@click.option(
    "--adapters",
    multiple=True,
    metavar="FOLDER|REPO",
    help="LoRA or deep prompts in PEFT's format that every client may use. May be repeated.",
)
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder for files from the hub.")
@click.option(
    "--weights-from",
    default="auto",
    metavar="auto|hub|peers|FOLDER",
    help="Where the weights of MODEL come from (docs/public-swarm.md). auto: this machine or the hub, and from servers "
    "of the swarm that share them if the hub cannot be reached.",
)
@console.digests_option
@click.option(
    "--share-weights",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="Let other servers and clients get weights from this one. Licences of some models forbid it among strangers, "
    "so auto is on in a private swarm only.",
)
@click.option(
    "--share-rate",
    metavar="SIZE",
    help="Bytes a second that are sent so at most, such as 10MB. While clients use this server it sends less anyway.  "
    "[default: no limit]",
)
@click.option(
    "--vouchers",
    multiple=True,
    metavar="PEER_ID",
    help="Whose word counts when a client spends points that others owe it (docs/trust.md), such as that of a gateway "
    "which all use. May be repeated.",
)
@click.option("--update-period", type=click.FloatRange(1, 200), default=30.0, help="Seconds between announcements.")
@click.option("--threads", type=click.IntRange(min=1), help="Number of torch threads.  [default: torch decides]")
@console.metrics_option
@console.log_format_option
@console.errors_to_exit_codes
def main(**options: Any) -> None:
    """Serve blocks of MODEL: a local folder, a GGUF file, a model's name on the hub, or nothing for the demo model.

    Once clients can use the server, it prints a line that begins with "Ready:".
    """
    peers = console.split_addresses(options["initial_peers"])
    source = click.get_current_context().get_parameter_source("initial_peers")
    overridden = peers if options["new_swarm"] and source is ParameterSource.ENVIRONMENT else ()
    peers = peers if not overridden else ()
    if bool(peers) == options["new_swarm"]:
        problem = "--initial-peers and --new-swarm contradict each other" if peers else "say which swarm to serve"
        raise InvalidOption(
            f"{problem}: --initial-peers ADDRESS... joins one "
            f"({console.INITIAL_PEERS_VARIABLE} stands in for it), --new-swarm starts one"
        )
    began = time.monotonic()
    with console.importing_packages():
        import uvloop

        from swarm.server.lifecycle import Server
        from swarm.transport.p2p import quiet_hivemind

        config = _server_config(options, peers)
    imported_s = time.monotonic() - began
    console.configure_logging(options["log_format"])
    if overridden:
        logger.warning("Starting a new swarm: --new-swarm overrides %s", console.INITIAL_PEERS_VARIABLE)
    quiet_hivemind()
    _use_huge_pages()
    server = Server(config)
    uvloop.run(_serve(server, config.model, imported_s))
    if server.computing:  # loading, say; Python would abort the process where it ends the thread inside torch
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def _server_config(options: Mapping[str, Any], peers: tuple[str, ...]) -> ServerConfig:
    """The configuration that these command line options ask for. Raises `InvalidOption` or `InvalidSpan`."""
    from swarm.membership.invite import read_invite
    from swarm.metrics.endpoint import MetricsAddress
    from swarm.server.config import BlocksOption, ExitsOption, ServerConfig, WeightsOption, parse_throughput
    from swarm.server.flash_budget import FlashOption
    from swarm.transport.p2p import P2PConfig

    return ServerConfig(
        **{name: options[name] for name in OPTIONS_AS_GIVEN},
        blocks=BlocksOption.parse(options["blocks"]),
        p2p=P2PConfig(
            initial_peers=peers,
            host_maddrs=console.split_addresses(options["host_maddrs"]),
            announce_maddrs=console.split_addresses(options["announce_maddrs"]),
            identity_path=options["identity_path"],
            membership=read_invite(options["membership"]),
            relay=options["relay"],
        ),
        throughput=parse_throughput(options["throughput"]),
        weights=WeightsOption(
            source=options["weights_from"],
            digests=options["digests"],
            share={"on": True, "off": False}.get(options["share_weights"]),
            share_rate=console.parse_size("--share-rate", options["share_rate"]),
        ),
        metrics=MetricsAddress.parse(options["metrics"]) if options["metrics"] is not None else None,
        flash=FlashOption.parse(options["flash"]),
        exits=ExitsOption.parse(options["exits"]) if options["exits"] is not None else None,
    )


async def _serve(server: Server, model: str | None, imported_s: float) -> None:
    """Run until SIGINT or SIGTERM, also while the server is still starting.

    Args:
        imported_s: seconds that the imports took.
    """
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
    phases = {"Python packages": imported_s, **server.start_phases}
    waits = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    logger.info("Started in %.1f s: %s", sum(phases.values()), waits)
    gc.collect()
    gc.freeze()  # what is loaded stays
    for line in join_instructions(model, await server.peer.join_addresses()):
        logger.info("%s", line)
    lost = asyncio.create_task(server.lost())
    await asyncio.wait({leaving, lost}, return_when=asyncio.FIRST_COMPLETED)
    error = lost.result() if lost.done() else None  # look before the daemon is shut down on purpose
    lost.cancel()
    logger.info("Leaving the swarm")
    await server.stop()
    if error is not None:
        raise error


def _use_huge_pages() -> None:
    """Have torch ask Linux for huge pages: weights are read a tenth faster. Must come before torch's first tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def join_instructions(model: str | None, addresses: tuple[str, ...]) -> tuple[str, str]:
    """The command that starts another server of this swarm, and the line of Python that uses the swarm."""
    first = addresses[0]
    model_argument = f" {model}" if model else ""
    argument = repr(model) + ", " if model else ""
    return (
        f"Join:   swarm server{model_argument} --initial-peers {first}",
        f"Client: swarm.AutoDistributedModelForCausalLM.from_pretrained({argument}initial_peers=[{first!r}])",
    )


if __name__ == "__main__":
    main(prog_name="python -m swarm.server")
