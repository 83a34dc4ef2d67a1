"""`swarm doctor`: finds what keeps this machine from joining a swarm, and says how to fix it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.errors import AddressUnavailable

if TYPE_CHECKING:
    from swarm.cli.doctor.verdicts import Finding
    from swarm.transport.p2p import P2PConfig

CHECK_TIMEOUT_S = 60.0
"""Limit for each check of this machine: loading torch, or a request to the model hub, may take long."""


@click.command(name="doctor", cls=console.MultiAddressCommand)
@click.argument("model", required=False)
@console.initial_peers_option
@console.membership_option
@click.option("--device", default="auto", show_default=True, help="Torch device such as cpu or cuda:0.")
@console.host_maddrs_option(0, "Addresses on which a server would listen.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of findings.")
@console.errors_to_exit_codes
def main(
    model: str | None,
    initial_peers: tuple[str, ...],
    membership: str | None,
    device: str,
    host_maddrs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check this machine: whether it can serve MODEL and how much of it, software, device, disk and ports. With
    --initial-peers, check the connection to the swarm too: each peer, the clock, and a record written to the DHT and
    read back.

    The drive is measured with a scratch file of at most 256 MB. The default MODEL is the demo model. The exit code is 1
    if a check failed.
    """
    import uvloop

    from swarm.cli.doctor.verdicts import exit_code, format_finding, format_summary, to_json
    from swarm.membership.invite import read_invite
    from swarm.transport.addresses import parse_peers, validate_listen_addresses
    from swarm.transport.p2p import P2PConfig

    peers = parse_peers(console.split_addresses(initial_peers))
    joining = P2PConfig(peers, membership=read_invite(membership))
    listen = console.split_addresses(host_maddrs)
    with suppress(AddressUnavailable):  # reported as a finding; an invalid address is a usage error
        validate_listen_addresses(listen)
    findings: list[Finding] = []

    async def run_checks() -> None:
        async for finding in _findings(model, joining, device, listen):
            findings.append(finding)
            if not as_json:
                click.echo(_coloured_on_terminal(format_finding(finding)), color=True)

    uvloop.run(run_checks())
    click.echo(to_json(findings) if as_json else format_summary(findings))
    sys.exit(exit_code(findings))


async def _findings(
    model: str | None, joining: P2PConfig, device: str, listen: tuple[str, ...]
) -> AsyncIterator[Finding]:
    """Run all checks and yield their findings, one after the other."""
    from swarm.cli.doctor import machine_checks as machine
    from swarm.cli.doctor.verdicts import Verdict

    yield await _run_check("Model", lambda: machine.check_model(model, device))
    for finding in machine.check_software():
        yield finding
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("CPU", machine.check_cpu),
        ("GPU", lambda: machine.check_gpu(device)),
        ("Disk", machine.check_disk),
        ("Drive", machine.check_drive),
    )
    if await asyncio.to_thread(machine.computes_on_gpu, device):
        checks = (*checks[:2], ("Execution", lambda: machine.check_execution(device)), *checks[2:])
    for name, check in checks:
        yield await _run_check(name, check)
    from swarm.cli.doctor import network_checks as network
    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    listening, *guesses = await network.check_listening(listen)
    yield listening
    peer_findings, answering = await network.check_peers(joining)
    for finding in peer_findings:
        yield finding
    clock_is_right = all(
        finding.check != "Clock" or finding.verdict is not Verdict.FAILURE for finding in peer_findings
    )
    joining = replace(joining, initial_peers=tuple(answering))
    if answering and clock_is_right and listening.verdict is Verdict.OK:
        yield await network.check_reachability(replace(joining, host_maddrs=listen))
    else:
        for finding in guesses:
            yield finding
    yield await network.check_dht(joining, clock_is_right)


async def _run_check(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check in a thread, which is abandoned after `CHECK_TIMEOUT_S`."""
    from swarm.cli.doctor import verdicts

    loop = asyncio.get_running_loop()
    result: asyncio.Future[Finding] = loop.create_future()

    def set_result(finding: Finding) -> None:
        if not result.done():
            result.set_result(finding)

    def run() -> None:
        try:
            finding = check()
        except Exception as error:  # noqa: BLE001  (a broken installation can raise anything)
            first = (str(error).splitlines() or [""])[0]
            finding = verdicts.failure(name, f"{type(error).__name__}: {first}", verdicts.UPGRADE_COMMAND)
        with suppress(RuntimeError):  # the report is complete and its event loop closed
            loop.call_soon_threadsafe(set_result, finding)

    threading.Thread(target=run, name="swarm-doctor", daemon=True).start()
    try:
        return await asyncio.wait_for(result, CHECK_TIMEOUT_S)
    except TimeoutError:
        return verdicts.failure(
            name, f"no result within {CHECK_TIMEOUT_S:.0f} s", "try again when the machine is less busy"
        )


def _coloured_on_terminal(text: str) -> str:
    return text if sys.stdout.isatty() and "NO_COLOR" not in os.environ else click.unstyle(text)
