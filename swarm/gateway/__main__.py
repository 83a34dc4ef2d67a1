"""The command `swarm gateway`, also `python -m swarm.gateway`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm.common import console
from swarm.errors import InvalidOption

if TYPE_CHECKING:
    from swarm.gateway.settings import GatewaySettings


@click.command(name="gateway", cls=console.MultiAddressCommand, context_settings={"show_default": True})
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@console.initial_peers_option
@console.membership_option
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all addresses of this machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes any free port.")
@click.option(
    "--keys",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Key file, see `swarm keys`. Required if other machines can reach the gateway, unless --open is given.",
)
@click.option("--open", is_flag=True, help="Let everyone who can reach the gateway use it, without a key.")
@click.option(
    "--host-name",
    "host_names",
    multiple=True,
    metavar="NAME",
    help="Name under which the gateway is reached, such as that of a proxy. May be repeated. Without keys, other names "
    "than those of this machine are refused.",
)
@click.option(
    "--concurrent",
    type=click.IntRange(1, 256),
    default=64,
    help="Answers generated at the same time. A server accepts 256 sessions of one client.",
)
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    help="Other web site whose pages may use the gateway, such as https://chat.example. May be repeated.",
)
@click.option(
    "--public-status",
    is_flag=True,
    help="Show /metrics and /monitor/ without a key, even if the gateway has keys.",
)
@click.option("--wire", default="auto", help="Wire format of hidden states: auto, none, float16, bfloat16, blockwise8.")
@click.option("--exact/--no-exact", default=True, help="Use no server that computes with some neurons only (sparse).")
@console.audit_options
@click.option(
    "--points",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Spend the points of this key: the --identity-path of your own server (docs/trust.md).",
)
@console.digests_option
@console.weights_from_option
@console.draft_option
@click.option(
    "--prefix-memory",
    metavar="SIZE",
    help="Memory of this machine for what earlier requests have computed, so that the next request of the same key "
    "computes only what is new; 0 for none.  [default: an eighth of what is free, at most 4 GiB]",
)
@click.option(
    "--early-exit",
    type=click.FloatRange(0, 1),
    metavar="CONFIDENCE",
    help="Let tokens leave early where their confidence is above this. Answers stay those of the full model, because "
    "each token is verified.  [default: only if a request asks]",
)
@click.option(
    "--exits-from",
    "exits",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Lenses and classifiers for one of the models, from model.save_exits. May be repeated.",
)
@click.option(
    "--approximate-exits",
    is_flag=True,
    help="Accept requests whose early tokens are not verified. Their answers are approximate.",
)
@console.log_format_option
@console.errors_to_exit_codes
def main(**options: Any) -> None:
    """Serve MODELs of the swarm over OpenAI's HTTP interface, with a chat page for the browser.

    A MODEL is a local folder, a GGUF file or a hub id, as for the server. The default is the demo model.
    """
    console.configure_logging(options["log_format"])
    settings = _gateway_settings(options)
    with console.importing_packages():
        from swarm.client.config import NetworkOptions, parse_share
        from swarm.gateway.lifecycle import ListenAddress, serve_gateway
        from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    if options["digests"] is not None and len(options["models"]) > 1:
        raise InvalidOption("--digests is for one model; put swarm-digests.json beside each checkpoint instead")
    network = NetworkOptions(
        audit=parse_share("--audit", options["audit"]),
        **{name: options[name] for name in ("exact", "points", "digests", "opinions")},
    )
    client = {
        "network": network,
        **{name: options[name] for name in ("wire", "membership", "weights_from")},
    }
    peers = console.split_addresses(options["initial_peers"])
    if peers:
        client["initial_peers"] = peers
    address = ListenAddress(options["host"], options["port"])
    models = options["models"] or (None,)
    serve_gateway(models, client, settings, options["keys"], address, True, options["exits"], options["drafts"])


def _gateway_settings(options: Mapping[str, Any]) -> GatewaySettings:
    """The settings that these command line options ask for. Raises `InvalidOption` or `UsageError`."""
    threshold = options["early_exit"]

    from swarm.client.early_exit.options import EarlyExit
    from swarm.gateway.settings import GatewaySettings

    return GatewaySettings(
        cors_origins=options["cors"],
        host_names=options["host_names"],
        open=options["open"],
        max_concurrent_texts=options["concurrent"],
        public_status=options["public_status"],
        prefix_memory=console.parse_size("--prefix-memory", options["prefix_memory"]),
        early_exit=None if threshold is None else EarlyExit(threshold=threshold),
        approximate_exits=options["approximate_exits"],
    )


if __name__ == "__main__":
    main(prog_name="python -m swarm.gateway")
