"""What this device is, as a ring's planner has to know it: free memory and disk now, and a speed measured once."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil

from swarm.common.files.atomic_file import replace_file
from swarm.common.files.folders import nearest_folder
from swarm.common.machine import available_memory
from swarm.common.processes import bound_command
from swarm.common.units import format_bytes
from swarm.common.version import VERSION
from swarm.errors import InvalidOption, SwarmError
from swarm.protocol.messages.peers import DeviceReport, DtypeName, Holding

logger = logging.getLogger(__name__)

SPEED_FILE = "speed.json"
MAX_FILE_BYTES = 1 << 16
MEASUREMENT_TIMEOUT_S = 300.0
"""A measurement takes seconds; importing torch may take longer on a machine that is busy or small."""

MAX_NAME_CHARACTERS = 64


class DeviceSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast a device computes.

    Attributes:
        device: "cpu", or "cuda" with its index.
        label: shown to people.
        read_rates: for each dtype's name, bytes/s at which weights are read and multiplied by one token.
        block_seconds: what a block costs for one token beyond its weights.
        memory: bytes of the GPU's own memory that are free; None on a CPU, whose memory is looked at when it is asked.
    """

    device: str
    label: str
    read_rates: dict[DtypeName, float]
    block_seconds: float
    memory: int | None = None


class _KeptSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    conditions: str
    speed: DeviceSpeed


@dataclass(frozen=True)
class Device:
    """This device.

    Attributes:
        name: shown to people.
        speed: as it was measured.
        folder: where weights are kept.
    """

    name: str
    speed: DeviceSpeed
    folder: Path

    def report(
        self, holding: Holding | None = None, own_process: int | None = None, kept_bytes: int = 0
    ) -> DeviceReport:
        """What this device has now.

        Args:
            holding: what it is assigned.
            own_process: id of the server that this worker runs, whose memory it may use again.
        """
        memory = self.speed.memory
        if memory is None:
            memory = available_memory() + (_memory_of(own_process) if own_process is not None else 0)
        disk = shutil.disk_usage(nearest_folder(self.folder)).free
        rates = {name: min(max(rate, 1.0), 1e18) for name, rate in self.speed.read_rates.items()}
        return DeviceReport(
            self.name, self.speed.label, memory, disk, rates, min(self.speed.block_seconds, 3600.0), holding
        )


def describe(report: DeviceReport) -> str:
    """A device in one line, for people."""
    rate = report.read_rates["bfloat16"]
    return (
        f"{report.device}, {format_bytes(report.memory)} of memory and {format_bytes(report.disk)} of disk free, reads "
        f"{format_bytes(rate)}/s of weights in bfloat16"
    )


def device_name(given: str | None = None) -> str:
    """The name to show: as given, or the machine's, without characters that control a terminal."""
    name = "".join(filter(str.isprintable, given or socket.gethostname())).strip()[:MAX_NAME_CHARACTERS]
    return name or "worker"


async def find_speed(folder: Path, device: str, threads: int | None = None) -> DeviceSpeed:
    """The speed that was measured before under the same conditions, or is measured now and kept in the folder.

    Args:
        device: torch device, or "auto".
        threads: torch threads; None for OMP_NUM_THREADS, or torch's own choice.

    Raises:
        InvalidOption: this machine has no such device.
        SwarmError: the measurement failed.
    """
    path = folder / SPEED_FILE
    conditions = measurement_conditions(device, threads)
    kept = _read(path)
    # The free memory of a GPU changes, so it is looked at whenever a worker starts.
    if kept is not None and kept.conditions == conditions and kept.speed.memory is None:
        return kept.speed
    speed = await _measure(device, threads)
    keep_speed(folder, conditions, speed)
    return speed


def measurement_conditions(device: str, threads: int | None) -> str:
    """All that a measurement depends on; one under the same conditions counts for this one."""
    versions = f"swarm {VERSION}", f"torch {version('torch')}"
    return ", ".join([device, str(threads or os.environ.get("OMP_NUM_THREADS")), *versions, socket.gethostname()])


def keep_speed(folder: Path, conditions: str, speed: DeviceSpeed) -> None:
    """Keep what was measured, for later starts."""
    try:
        replace_file(folder / SPEED_FILE, msgspec.json.encode(_KeptSpeed(conditions, speed)))
    except OSError as error:
        logger.warning("The measured speed is not kept: %s", error.strerror)


def _read(path: Path) -> _KeptSpeed | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_KeptSpeed)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


async def _measure(device: str, threads: int | None) -> DeviceSpeed:
    command = bound_command("swarm.ring.worker.device_measurement", "--device", device)
    environment = dict(os.environ)  # uvloop takes no other mapping
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(MEASUREMENT_TIMEOUT_S):
            printed, errors, _ = await asyncio.gather(
                process.stdout.read(), process.stderr.read(), process.wait()
            )  # not `communicate`, which would close the pipe that keeps it alive
    except TimeoutError:
        raise SwarmError(f"measuring this device took more than {MEASUREMENT_TIMEOUT_S:.0f} s; try again") from None
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 2:
        raise InvalidOption(errors.decode(errors="replace").strip().removeprefix("Error: "))
    try:
        return msgspec.json.decode(printed, type=DeviceSpeed)
    except msgspec.MsgspecError:
        last = (errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise SwarmError(f"this device could not be measured: {last}") from None


def _memory_of(pid: int) -> int:
    """Bytes that a process and its children have for themselves."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0
