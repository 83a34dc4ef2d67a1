"""`swarm plan`: finds the blocks that each device of a private swarm should hold for the best throughput."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click
import msgspec

from swarm.common import console
from swarm.errors import InvalidOption, UsageError
from swarm.planning import group_description, plan_report
from swarm.planning.device_group import ModelSize
from swarm.planning.group_description import GroupDescription, ModelDescription
from swarm.planning.partition import partition

FILE_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command(name="plan", cls=console.MultiAddressCommand)
@click.argument("file", required=False, type=FILE_PATH)
@click.option("--model", help="Local folder, GGUF file or hub id, instead of the file's.  [default: the demo model]")
@click.option("--revision", help="Branch, tag or commit of a model from the hub.")
@console.initial_peers_option
@console.membership_option
@click.option("--write", type=FILE_PATH, help="Write the group's description as YAML, to edit and plan again.")
@click.option("--json", "json_file", type=FILE_PATH, help="Write the plan as JSON.")
@console.errors_to_exit_codes
def main(
    file: Path | None,
    model: str | None,
    revision: str | None,
    initial_peers: tuple[str, ...],
    membership: str | None,
    write: Path | None,
    json_file: Path | None,
) -> None:
    """Plan a private swarm: print which blocks each device should hold, and the commands that start the servers.

    FILE describes the devices (see docs/private-swarm.md). Without it, the plan is for the servers that are online in
    the swarm of --initial-peers, based on what they announce.
    """
    peers = console.split_addresses(initial_peers)
    options = {"model": model, "revision": revision}
    given = {name: value for name, value in options.items() if value is not None}
    if file is not None:
        description = msgspec.structs.replace(group_description.read_group_file(file), **given)
        size = _model_size(description)
    elif peers:
        description, size = _describe_running_swarm(peers, membership, model, revision)
    else:
        raise UsageError(
            "nothing to plan for: give a FILE that describes the devices, "
            "or --initial-peers ADDRESS... of a running swarm"
        )
    if write is not None:
        _write_new(
            write, group_description.to_yaml(description, group_description.FILE_COMMENT if file is None else "")
        )

    group = group_description.build_group(description, size)
    plan = partition(group)
    advice = plan_report.advise(group, plan)
    startup = _start_options(description, peers)
    click.echo(plan_report.format_plan(group, plan, advice, str(description.link)))
    click.echo(f"\n{plan_report.format_commands(plan, startup)}")
    if json_file is not None:
        _write(json_file, plan_report.plan_to_json(group, plan, advice, startup))


def _model_size(description: GroupDescription) -> ModelSize:
    model = description.model
    if isinstance(model, ModelDescription):
        return group_description.described_model_size(model, description.dtype)
    from swarm.models.checkpoints.checkpoint import open_checkpoint  # loads torch, which numbers do without
    from swarm.planning.live_swarm import model_size

    return model_size(open_checkpoint(model, revision=description.revision), description.dtype, description.quant)


def _describe_running_swarm(
    peers: tuple[str, ...],
    membership: str | None,
    model: str | None,
    revision: str | None,
) -> tuple[GroupDescription, ModelSize]:
    import uvloop

    from swarm.membership.invite import read_invite
    from swarm.models.checkpoints.checkpoint import open_checkpoint
    from swarm.models.weights.quantization import QUANTIZATION_FORMS
    from swarm.planning.live_swarm import fetch_compatible_servers, model_size
    from swarm.transport.p2p import P2PConfig, quiet_hivemind

    quiet_hivemind()
    checkpoint = open_checkpoint(model, revision=revision)
    found = uvloop.run(fetch_compatible_servers(checkpoint, P2PConfig(peers, membership=read_invite(membership))))
    for peer, reason in found.excluded.items():
        click.echo(f"Left out of the plan: …{peer[-6:]}, {reason}", err=True)
    form = group_description.common_quantization(found.servers)
    size = model_size(checkpoint, "auto", form)
    held = {}
    for announced in {server.quantization for server in found.servers} & QUANTIZATION_FORMS:
        with suppress(InvalidOption):  # a server says that weights are packed, and this checkpoint's are not
            held[announced] = model_size(checkpoint, "auto", announced)
    description = group_description.describe_servers(found.servers, size, model, held)
    return msgspec.structs.replace(description, revision=revision, quant=form), size


def _start_options(description: GroupDescription, peers: tuple[str, ...]) -> plan_report.StartOptions:
    model = description.model.name if isinstance(description.model, ModelDescription) else description.model
    options = ["--cache-tokens", str(description.cache_tokens)]
    if description.revision is not None:
        options += ["--revision", description.revision]
    if description.dtype != "auto":
        options += ["--dtype", description.dtype]
    if description.quant != "none":
        options += ["--quant", description.quant]
    return plan_report.StartOptions(model, tuple(options), peers)


def _write_new(path: Path, content: str) -> None:
    if path.exists():
        raise UsageError(f"--write {path}: the file exists and may have been edited; give another name")
    _write(path, content.encode())


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
