"""`swarm ring`: starts a ring of this machine and its workers, and chats, serves a gateway, or keeps it running."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from swarm.common import console
from swarm.errors import InvalidOption

if TYPE_CHECKING:  # torch and hivemind are imported only after the options are validated
    from swarm.ring.starter.handle import Ring
    from swarm.ring.starter.ring_options import RingOptions

FILE_PATH = click.Path(dir_okay=False, path_type=Path)


class _RingCommand(console.MultiAddressCommand):
    """A command whose `--workers` takes any number of lines."""

    OPTIONS = frozenset({"--workers", "--host-maddrs", "--announce-maddrs"})
    VALUES = ("/", "swarm-worker:")


@click.command(name="ring", cls=_RingCommand)
@click.argument("model", required=False, metavar="[MODEL|FILE.yaml]")
@click.option(
    "--workers", multiple=True, metavar="LINE...", help="The lines that `swarm worker` printed on the other machines."
)
@click.option(
    "--partition",
    metavar="2+5+5",
    help="Blocks of this machine (0 for none), and of each worker.  [default: the fastest, from what the devices are]",
)
@click.option("--chat", "wants_chat", is_flag=True, help="Chat with the model in this terminal.")
@click.option("--gateway", metavar="[HOST:]PORT", help="Serve OpenAI's HTTP interface and a chat page here.")
@click.option("--keys", type=FILE_PATH, help="With --gateway: only for these keys, see `swarm keys`.")
@click.option("--open", "is_open", is_flag=True, help="With --gateway: for all who can reach it, also without a key.")
@click.option(
    "--save", type=FILE_PATH, help="Write a YAML file with which `swarm ring FILE.yaml` starts the ring again."
)
@click.option("--unpair", is_flag=True, help="Only end the pairing with the workers, so that another starter may come.")
@click.option("--revision", help="Branch, tag or commit of a model from the hub.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="Data type that the devices compute in.  [default: the checkpoint's]",
)
@click.option("--quant", type=click.Choice(["none", "packed", "int8", "nf4"]), help="As --quant of swarm server.")
@click.option(
    "--cache-tokens", type=click.IntRange(1, 2**40), help="Attention cache of each worker, in tokens.  [default: 16384]"
)
@click.option("--threads", type=click.IntRange(min=1), help="Torch threads of each device.  [default: its own choice]")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with this starter's identity. One ring at a time uses it.  [default: ~/.local/share/swarm/ring]",
)
@console.host_maddrs_option(0, "Addresses to listen on, if not the port of last time on all interfaces.")
@click.option(
    "--announce-maddrs",
    multiple=True,
    metavar="ADDRESS...",
    help="Addresses at which the workers should dial this machine, if they differ (port forwarding).",
)
@console.membership_option
@console.errors_to_exit_codes
@click.pass_context
def main(context: click.Context, /, **given: Any) -> None:
    """Run MODEL on this machine and its workers together, which receive their blocks from here.

    MODEL is a local folder or a hub id, by default the demo model; FILE.yaml is what --save has written. The ring ends
    with this command, and the workers are idle again.
    """
    signal.signal(signal.SIGINT, _interrupt)  # a shell's background jobs start with it ignored
    signal.signal(signal.SIGTERM, _leave)
    if given["wants_chat"] and given["gateway"]:
        raise InvalidOption("--chat and --gateway cannot go together: chat in the browser, at the gateway's page")
    is_default = context.get_parameter_source("host_maddrs") is click.core.ParameterSource.DEFAULT
    options = _ring_options(given, () if is_default else console.split_addresses(given["host_maddrs"]))
    console.configure_logging()

    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    if given["unpair"]:
        _unpair(options)
        return
    import torch

    from swarm.cli.ring_progress import RingProgress
    from swarm.ring.starter.handle import Ring
    from swarm.ring.starter.ring_options import write_ring_file

    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    with ExitStack() as stack:
        watcher = stack.enter_context(RingProgress())
        ring = stack.enter_context(Ring.of(options, watcher))
        watcher.close()
        click.echo(f"The ring is complete: {ring.plan}", err=True)
        if given["save"] is not None:
            write_ring_file(given["save"], options)
            click.echo(f"`swarm ring {given['save']}` starts it again.", err=True)
        if given["wants_chat"]:
            _chat(ring)
        elif given["gateway"]:
            _serve_gateway(ring, given)
        else:
            _wait(ring)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # an exception, so that the workers are released


def _ring_options(given: Mapping[str, Any], host_maddrs: tuple[str, ...]) -> RingOptions:
    from swarm.membership.invite import read_invite
    from swarm.ring.pairing import parse_lines
    from swarm.ring.starter.ring_options import RingOptions, is_ring_file, options_of, partition_numbers, read_ring_file

    common = {
        "membership": read_invite(given["membership"]),
        "folder": given["folder"],
        "host_maddrs": host_maddrs,
        "announce_maddrs": console.split_addresses(given["announce_maddrs"]),
    }
    names = ("revision", "dtype", "quant", "cache_tokens", "threads")
    common |= {name: given[name] for name in names if given[name] is not None}
    if given["partition"] is not None:
        common["partition"] = partition_numbers(given["partition"])
    if is_ring_file(given["model"]):
        described = read_ring_file(Path(given["model"]))
        if given["workers"]:
            raise InvalidOption(f"--workers cannot be given with {given['model']}, which names the workers already")
        return options_of(described, common)
    return RingOptions(model=given["model"], workers=parse_lines(given["workers"]), **common)


def _chat(ring: Ring) -> None:
    from swarm.cli.chat.conversation import AnswerOptions
    from swarm.cli.chat.dialogue import Dialogue, Terminal
    from swarm.cli.chat.swarm_backend import SwarmBackend

    backend = SwarmBackend(ring.options.model, **ring.client_options)
    try:
        Dialogue(backend, Terminal(), AnswerOptions(), "").run()
    finally:
        backend.close()


def _serve_gateway(ring: Ring, given: Mapping[str, Any]) -> None:
    from swarm.gateway.lifecycle import ListenAddress, serve_gateway
    from swarm.gateway.settings import GatewaySettings

    host, _, port = given["gateway"].rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidOption(f"--gateway {given['gateway']}: give a port such as 8000, or HOST:PORT")
    address = ListenAddress(host or "127.0.0.1", int(port))
    settings = GatewaySettings(open=given["is_open"])
    serve_gateway([ring.options.model], ring.client_options, settings, given["keys"], address, False)


def _wait(ring: Ring) -> None:
    model = f"{ring.options.model!r}, " if ring.options.model is not None else ""
    local = f", local_blocks={ring.plan.local_blocks}" if ring.plan.local_blocks else ""
    click.echo("Use it from Python on this machine, until Ctrl-C ends the ring:", err=True)
    click.echo(
        f"swarm.AutoDistributedModelForCausalLM.from_pretrained({model}initial_peers=[{ring.initial_peers[0]!r}]{local})"
    )
    sys.stdout.flush()
    threading.Event().wait()


def _unpair(options: RingOptions) -> None:
    from swarm.ring.starter.handle import unpair

    for line, is_done in unpair(options).items():
        click.echo(f"{line}: {'another starter may use it now' if is_done else 'not reached'}")
