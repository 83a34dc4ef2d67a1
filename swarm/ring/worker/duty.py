"""Carries out a worker's assignments on this device: receives the weights, and runs a server of them as a child."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from swarm.protocol.messages import Assign, DeviceReport, Holding, WorkerEvent
from swarm.ring.worker.device import Device
from swarm.ring.worker.server_process import ServerProcess

UPDATE_PERIOD_S = 5
"""A ring is small, so its servers can announce themselves often: a starter that was started again sees them soon."""


class Weights(Protocol):
    """Where the weights come from; see `WorkerWeights`."""

    def know(self, assignment: Assign) -> None:
        """The holders have changed."""

    async def receive(self, assignment: Assign, on_progress: Callable[[int, int], None]) -> Path:
        """Receive what is missing; the folder of the model."""


@dataclass(frozen=True)
class ServerOptions:
    """What the worker, and not the starter, says about its server.

    Attributes:
        host_maddrs: addresses to listen on.
        device: torch device, or "auto".
        threads: torch threads; None for what the starter says.
        environment: added to the environment of the process; the membership, which no other user may see, is in it.
    """

    host_maddrs: tuple[str, ...]
    device: str = "auto"
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


class WorkerDuty:
    """See `swarm.ring.worker.life.Duty`.

    A server keeps serving its blocks while the weights of others arrive, and is replaced when they are there.
    """

    def __init__(self, device: Device, weights: Weights, options: ServerOptions) -> None:
        self._device = device
        self._weights = weights
        self._options = options
        self._server: ServerProcess | None = None

    def report(self, holding: Holding | None) -> DeviceReport:
        return self._device.report(holding, self._server.pid if self._server is not None else None)

    def know(self, assignment: Assign) -> None:
        self._weights.know(assignment)

    async def carry_out(self, assignment: Assign, tell: Callable[[WorkerEvent], None]) -> None:
        number, former = assignment.number, self._server.peer_id if self._server is not None else None
        folder = await self._weights.receive(
            assignment, lambda done, total: tell(WorkerEvent("receiving", number, "", done, total, former))
        )
        tell(WorkerEvent("starting", number))
        await self.stop()
        arguments = server_arguments(assignment, folder, self._device.name, self._options)
        self._server = await ServerProcess.start(
            arguments, self._options.environment, lambda line: tell(WorkerEvent("starting", number, line))
        )
        server_id = await self._server.ready()
        tell(WorkerEvent("online", number, server_id=server_id))
        raise await self._server.ended()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None


def server_arguments(assignment: Assign, folder: Path, name: str, options: ServerOptions) -> Sequence[str]:
    """The arguments of `swarm server` for an assignment. Pure."""
    threads = options.threads if options.threads is not None else assignment.threads
    return [
        *(str(folder), "--blocks", f"{assignment.start}:{assignment.end}"),
        *("--initial-peers", *assignment.initial_peers, "--host-maddrs", *options.host_maddrs, "--relay", "off"),
        *("--device", options.device, "--dtype", assignment.dtype, "--quant", assignment.quant, "--flash", "off"),
        *("--share-weights", "off"),  # the worker shares them itself, with its ring only
        *("--cache-tokens", str(assignment.cache_tokens), "--update-period", str(UPDATE_PERIOD_S), "--name", name),
        *(("--threads", str(threads)) if threads is not None else ()),
    ]
