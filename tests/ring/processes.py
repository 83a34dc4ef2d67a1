"""Workers as real processes, for tests of rings on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.ring.pairing import parse_line
from swarm.ring.worker.device import DeviceSpeed, keep_speed, measurement_conditions

RATES = {"float32": 1e9, "bfloat16": 1e9, "float16": 1e9}


def know_speed(folder: Path, device: str, threads: int | None) -> Path:
    """A folder in which the speed of this device was measured before, which takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    keep_speed(folder, measurement_conditions(device, threads), DeviceSpeed("cpu", "cpu, 1 threads", RATES, 1e-4))
    return folder


class WorkerProcess:
    """A `swarm worker`, which can be killed and started again in the same folder.

    Args:
        measures: whether it measures the device's speed itself, as a new worker does.
    """

    def __init__(self, folder: Path, name: str, measures: bool = False) -> None:
        self.line = ""
        self.folder = folder / name if measures else know_speed(folder / name, "auto", 1)
        self._name = name
        self._temporary = folder / "tmp"  # short-lived sockets and folders, also of those that are killed
        self._temporary.mkdir(exist_ok=True)
        self._address = LOOPBACK
        self.start()

    def start(self, *options: str) -> None:
        """Start it, at the address where it was before if it was killed."""
        arguments = ("swarm.cli", "worker", "--folder", str(self.folder), "--name", self._name, *options)
        environment = {"TMPDIR": str(self._temporary), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.process = PeerProcess((*arguments, "--host-maddrs", self._address), environment)
        self.line = self.process.wait_for(r"^(swarm-worker:\S+)")[1]
        (self._address,) = parse_line(self.line).addresses
        self.process.wait_for("^Waiting")

    @property
    def parts(self) -> dict[str, int]:
        """The files of blocks that it has received, and when each was written (ns)."""
        return {path.name: path.stat().st_mtime_ns for path in self.folder.rglob("block-*.safetensors")}

    @property
    def servers(self) -> list[psutil.Process]:
        """Servers that it runs now."""
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if any("swarm.server" in word for word in child.cmdline())]

    def kill(self) -> None:
        """End it as a power cut would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
