"""`swarm doctor`: what keeps this machine from taking part, and what to do about it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.errors import AddressUnavailable

if TYPE_CHECKING:
    from swarm.cli.doctor.verdicts import Finding

SECONDS = 60.0
"""For each look at this machine: loading torch, or asking the model hub, may take long."""


@click.command(name="doctor", cls=console.MultiAddressCommand)
@click.argument("model", required=False)
@console.initial_peers_option
@click.option("--device", default="auto", show_default=True, help="Torch device such as cpu or cuda:0.")
@click.option(
    "--host-maddrs",
    multiple=True,
    default=("/ip4/0.0.0.0/tcp/0",),
    show_default=True,
    metavar="ADDRESS...",
    help="Where a server would listen. Port 0 takes any free port.",
)
@click.option(
    "--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="Where files from the hub are kept."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of findings.")
@console.exit_codes
def main(
    model: str | None,
    initial_peers: tuple[str, ...],
    device: str,
    host_maddrs: tuple[str, ...],
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Check this machine: software, device, memory for blocks of MODEL, disk, ports; and with --initial-peers the way
    to the swarm: each peer, the clock, a record written to the DHT and read again.

    Without MODEL it is the demo model. Exit code 1 if something failed.
    """
    import uvloop

    from swarm.cli.doctor import report
    from swarm.cli.doctor.verdicts import worst
    from swarm.transport.addresses import check_free, parse_peers

    peers = parse_peers(console.split(initial_peers))
    listen = console.split(host_maddrs)
    with suppress(AddressUnavailable):  # which is a finding; an address that is none is not
        check_free(listen)
    findings: list[Finding] = []

    async def examine() -> None:
        async for finding in _findings(model, peers, device, listen, cache_dir):
            findings.append(finding)
            if not as_json:
                click.echo(_seen(report.text(finding)), color=True)

    uvloop.run(examine())
    click.echo(report.to_json(findings) if as_json else report.summary(findings))
    sys.exit(worst(findings))


async def _findings(
    model: str | None, peers: tuple[str, ...], device: str, listen: tuple[str, ...], cache_dir: Path | None
) -> AsyncIterator[Finding]:
    """All findings, one after the other as they come."""
    from swarm.cli.doctor import machine_checks as machine
    from swarm.cli.doctor.verdicts import Verdict

    for finding in machine.software():
        yield finding
    looks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("CPU", machine.processor),
        ("GPU", lambda: machine.graphics(device)),
        ("Memory", lambda: machine.room(model, device, cache_dir)),
        ("Disk", lambda: machine.disk(cache_dir)),
    )
    for check, look in looks:
        yield await _limited(check, look)
    from swarm.cli.doctor import network_checks as network
    from swarm.transport.p2p import quiet_hivemind

    quiet_hivemind()
    for finding in await network.listening(listen):
        yield finding
    of_peers, answering = await network.peers(peers)
    for finding in of_peers:
        yield finding
    right = all(one.check != "Clock" or one.verdict is not Verdict.FAILURE for one in of_peers)
    yield await network.record(answering, right)


async def _limited(check: str, look: Callable[[], Finding]) -> Finding:
    """What `look` finds, in a thread that nobody waits for if it takes too long."""
    from swarm.cli.doctor import verdicts

    loop = asyncio.get_running_loop()
    found: asyncio.Future[Finding] = loop.create_future()

    def tell(finding: Finding) -> None:
        if not found.done():
            found.set_result(finding)

    def work() -> None:
        try:
            finding = look()
        except Exception as error:  # whatever is broken here is what the person wants to know
            first = (str(error).splitlines() or [""])[0]
            finding = verdicts.failure(check, f"{type(error).__name__}: {first}", verdicts.INSTALL)
        with suppress(RuntimeError):  # the report is complete, and its loop closed
            loop.call_soon_threadsafe(tell, finding)

    threading.Thread(target=work, name="swarm-doctor", daemon=True).start()
    try:
        return await asyncio.wait_for(found, SECONDS)
    except TimeoutError:
        return verdicts.failure(check, f"no result within {SECONDS:.0f} s", "try again when the machine is less busy")


def _seen(text: str) -> str:
    return text if sys.stdout.isatty() and "NO_COLOR" not in os.environ else click.unstyle(text)


if __name__ == "__main__":
    main(prog_name="python -m swarm.cli.doctor.command")
