"""`swarm worker`: lends this machine to a ring. It needs neither a model nor a configuration."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm.common import console
from swarm.common.units import format_bytes

if TYPE_CHECKING:  # hivemind is imported only after the options are validated
    from swarm.ring.worker.life import WorkerStatus
    from swarm.ring.worker.process import RunningWorker, WorkerOptions


@click.command(name="worker", cls=console.MultiAddressCommand)
@console.host_maddrs_option(0, "Addresses to listen on, if not the port of last time on all interfaces.")
@click.option(
    "--announce-maddrs",
    multiple=True,
    metavar="ADDRESS...",
    help="Addresses at which the starter should dial this machine, if they differ (port forwarding).",
)
@console.membership_option
@click.option("--name", help="Name that the starter sees.  [default: the machine's]")
@click.option("--device", default="auto", show_default=True, help="Torch device such as cpu or cuda:0.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with this worker's identity, pairing and weights.  [default: ~/.local/share/swarm/worker]",
)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the weights that it receives, on another drive for instance.  [default: inside --folder]",
)
@click.option("--forget", is_flag=True, help="End the pairing and make a new line: the one before counts no more.")
@console.log_format_option
@console.errors_to_exit_codes
@click.pass_context
def main(
    context: click.Context,
    host_maddrs: tuple[str, ...],
    announce_maddrs: tuple[str, ...],
    membership: str | None,
    name: str | None,
    device: str,
    folder: Path | None,
    cache_dir: Path | None,
    forget: bool,
    log_format: str,
) -> None:
    """Lend this machine to a ring: print a line for the starter (swarm ring --workers LINE), and do what it says.

    The first starter that has the line is this worker's starter from then on, and no other. It sends weights and says
    which blocks to serve; code is never sent. While no ring runs, this process waits and takes little memory.
    """
    import uvloop

    from swarm.membership.invite import read_invite
    from swarm.ring.joining import LockedFolder, default_folder
    from swarm.ring.worker.memory import WorkerMemory
    from swarm.ring.worker.process import WorkerOptions
    from swarm.transport.p2p import quiet_hivemind

    console.configure_logging(log_format)
    quiet_hivemind()
    logging.getLogger("swarm.transport.reach").setLevel(logging.WARNING)  # no peer dials a worker back
    given = context.get_parameter_source("host_maddrs") is not click.core.ParameterSource.DEFAULT
    locked = LockedFolder(folder or default_folder("worker"), "worker")
    try:
        if forget:
            WorkerMemory.read(locked.path).forgotten().write()
        options = WorkerOptions(
            folder=locked.path,
            cache_dir=cache_dir,
            name=name,
            host_maddrs=console.split_addresses(host_maddrs) if given else (),
            announce_maddrs=console.split_addresses(announce_maddrs),
            membership=read_invite(membership),
            device=device,
        )
        uvloop.run(_serve(options))
    finally:
        locked.close()


async def _serve(options: WorkerOptions) -> None:
    """Run until SIGINT or SIGTERM."""
    from swarm.ring.worker.process import running_worker

    leave = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave.set)
    with StatusLines() as lines:
        async with running_worker(options, lines.show) as worker:
            _introduce(worker, options.membership is not None)
            leaving, lost = asyncio.create_task(leave.wait()), asyncio.create_task(worker.lost())
            await asyncio.wait({leaving, lost}, return_when=asyncio.FIRST_COMPLETED)
            error = lost.result() if lost.done() else None
            for task in (leaving, lost):
                task.cancel()
            click.echo("Leaving")
    if error is not None:
        raise error


def _introduce(worker: RunningWorker, is_member: bool) -> None:
    from swarm.ring.worker.device import describe

    starter = worker.life.memory.starter
    click.echo(f"Worker: {worker.line}, at {', '.join(worker.line.addresses)}")
    click.echo(f"Device: {describe(worker.device)}")
    click.echo(f"Paired: {f'with the starter …{starter[-6:]}' if starter else 'not yet'}")
    if is_member:
        click.echo("Only members of the private swarm may use this worker. The line for the starter:")
    else:
        click.echo("The line for the starter, a secret: whoever has it may use this worker while it has no starter.")
    click.echo(f"\n{worker.line.to_line()}\n")
    click.echo("Waiting: swarm ring MODEL --workers LINE on the machine that has the model")


class StatusLines:
    """Prints what a worker does, with a progress bar while weights arrive."""

    def __init__(self) -> None:
        self._said: object = None
        self._bar: Any = None
        self._done = 0

    def show(self, status: WorkerStatus) -> None:
        """Print what has changed."""
        event, assignment = status.event, status.assignment
        is_receiving = event.state == "receiving" and event.total > 0
        if is_receiving and assignment is not None:
            if self._bar is None:
                title = f"Receiving blocks {assignment.start}:{assignment.end}"
                self._bar, self._done = console.progress_bar(title, event.total, "B").__enter__(), 0
            self._bar.update(event.done - self._done)
            self._done = event.done
        else:
            self._end_bar()
        said = (event.state, event.message, assignment and (assignment.model, assignment.start, assignment.end))
        if said != self._said:
            first, self._said = self._said is None, said
            if not (first and event.state == "idle"):
                click.echo(_status_line(status))

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None

    def __enter__(self) -> StatusLines:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_bar()


def _status_line(status: WorkerStatus) -> str:
    event, assignment = status.event, status.assignment
    if assignment is None:
        return "Idle: waiting for the starter"
    blocks = f"blocks {assignment.start}:{assignment.end} of {assignment.model}"
    match event.state:
        case "receiving":
            return f"Receiving {blocks}, {format_bytes(assignment.total_bytes)} as far as they are not here yet"
        case "starting":
            return event.message or f"Loading {blocks}"
        case "online":
            return f"Serving {blocks}"
        case _:
            return f"Failed: {event.message}"
