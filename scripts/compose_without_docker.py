"""Run the swarm of docker/compose.yaml without Docker: every command, health check and metrics target of the file.

Each service gets a loopback address of its own (127.x.y.z) in the place of its container, so names become addresses and
ports stay as they are. Volumes are temporary folders. What belongs to other images (Prometheus, Grafana) is not run;
what Prometheus would read is read here. At the end a message goes through the gateway, and all processes are ended.

    python scripts/compose_without_docker.py [--keep-logs FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[1] / "docker"
IMAGE = "swarm:"
START = 120.0
"""Seconds within which a service has to become healthy."""
LEAVE = 15.0
QUESTION = "Once upon a time"


class Failure(Exception):
    """The compose file does not do what it should; one line says where."""


@dataclass
class Place:
    """What stands in for the containers' network and volumes.

    Attributes:
        folder: everything temporary.
        addresses: loopback address of each service.
    """

    folder: Path
    addresses: dict[str, str] = field(default_factory=dict)

    def translated(self, text: str, service: str, mounts: dict[str, Path]) -> str:
        """A text of the compose file, as it has to be on this machine."""
        text = interpolated(text)
        for target, source in mounts.items():
            text = re.sub(rf"(?<![\w/]){re.escape(target)}(?=/|$|\W)", str(source), text)
        for name, address in self.addresses.items():
            text = re.sub(rf"/dns4/{re.escape(name)}(?=/|$)", f"/ip4/{address}", text)
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=:\d)", address, text)
        return re.sub(r"(?<![\d.])(?:0\.0\.0\.0|127\.0\.0\.1)(?![\d.])", self.addresses[service], text)


@dataclass
class Running:
    """A service under way."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        return "\n    ".join(self.log.read_text(errors="replace").splitlines()[-15:])


def interpolated(text: str) -> str:
    """As Compose does where no variable is set: `${NAME:-default}` and `$$`."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


def swarm_services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The services that run a command of ours, those that others depend on first."""
    left = {
        name: service
        for name, service in compose["services"].items()
        if service["image"].startswith(IMAGE) and "profiles" not in service
    }
    ordered: dict[str, dict[str, Any]] = {}
    while left:
        ready = [name for name, service in left.items() if set(service.get("depends_on", ())) <= set(ordered)]
        if not ready:
            raise Failure(f"services depend on each other or on none of ours: {', '.join(left)}")
        ordered |= {name: left.pop(name) for name in ready}
    return ordered


def free_addresses(names: list[str], ports: set[int]) -> dict[str, str]:
    """A loopback address for each name on which none of the ports is taken."""
    for _ in range(100):
        base = f"127.{random.randrange(1, 255)}.{random.randrange(256)}"
        found = {name: f"{base}.{number}" for number, name in enumerate(names, 1)}
        if all(is_free(address, port) for address in found.values() for port in ports):
            return found
    raise Failure("no loopback addresses with free ports were found")


def is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def ports_in(value: Any) -> set[int]:
    """Every port that a service may listen on, to see that they are free."""
    text = json.dumps(value)
    return {int(port) for port in re.findall(r"(?:/tcp/|:|--port=)(\d{4,5})\b", text) if int(port) < 1 << 16}


def mounts_of(service: dict[str, Any], place: Place) -> dict[str, Path]:
    """Target of each named volume of a service, and the folder that stands in for it."""
    found = {}
    for entry in service.get("volumes", ()):
        source, target = entry.split(":")[:2]
        if not source.startswith("."):
            found[target] = place.folder / f"volume-{source}"
            found[target].mkdir(mode=0o700, exist_ok=True)
    return found


def environment_of(service: dict[str, Any], place: Place, name: str) -> dict[str, str]:
    """What the image and the service set, and the place of this interpreter's own commands."""
    mounts = mounts_of(service, place)
    cache = mounts.get("/cache", place.folder)
    given = {key: place.translated(str(value), name, mounts) for key, value in service.get("environment", {}).items()}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(cache), **given}


def arguments_of(service: dict[str, Any], key: str) -> list[str]:
    value = service.get(key, ["swarm"] if key == "entrypoint" else [])
    return shlex.split(value) if isinstance(value, str) else [str(part) for part in value]


def start(name: str, service: dict[str, Any], place: Place) -> Running:
    mounts = mounts_of(service, place)
    words = [*arguments_of(service, "entrypoint"), *arguments_of(service, "command")]
    command = [place.translated(word, name, mounts) for word in words]
    log = place.folder / f"{name}.log"
    print(f"{name}: {shlex.join(words)}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment_of(service, place, name),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(name, process, log)


def wait_healthy(running: Running, service: dict[str, Any], place: Place) -> None:
    """Run the service's health check until it passes. Raises `Failure`."""
    kind, *words = service["healthcheck"]["test"]
    if kind != "CMD":
        raise Failure(f"the health check of {running.name} is a {kind}; write it as CMD")
    mounts = mounts_of(service, place)
    command = [place.translated(word, running.name, mounts) for word in words]
    deadline = time.monotonic() + START
    while True:
        checked = subprocess.run(
            command, env=environment_of(service, place, running.name), capture_output=True, check=False
        )
        if checked.returncode == 0:
            print(f"{running.name}: healthy", flush=True)
            return
        if running.process.poll() is not None:
            raise Failure(f"{running.name} ended with code {running.process.returncode}:\n    {running.tail()}")
        if time.monotonic() > deadline:
            why = checked.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise Failure(f"{running.name} did not become healthy in {START:.0f} s: {why}\n    {running.tail()}")
        time.sleep(0.5)


def chat(url: str) -> str:
    """What the model answers through the gateway."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    if answer["usage"]["completion_tokens"] < 1:
        raise Failure(f"the gateway answered with no token: {answer}")
    return str(answer["choices"][0]["message"]["content"])


def check_targets(place: Place) -> int:
    """Read what Prometheus would read; how many targets there are. Raises `Failure`."""
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    targets = [
        target for job in config["scrape_configs"] for entry in job["static_configs"] for target in entry["targets"]
    ]
    for target in targets:
        name, _, port = target.partition(":")
        if name not in place.addresses:
            raise Failure(f"prometheus.yml names {target}, and compose.yaml has no such service")
        with urllib.request.urlopen(f"http://{place.addresses[name]}:{port}/metrics", timeout=10) as reply:
            if b"\nswarm_" not in reply.read():
                raise Failure(f"{target} tells no metrics of the swarm")
    return len(targets)


def stop(services: list[Running]) -> None:
    """End all processes, the last one first; what does not leave in time is killed and told."""
    late = []
    for running in reversed(services):
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGTERM)
    for running in reversed(services):
        try:
            running.process.wait(LEAVE)
        except subprocess.TimeoutExpired:
            late.append(running.name)
            running.process.kill()
            running.process.wait()
    if late:
        raise Failure(f"did not leave within {LEAVE:.0f} s of SIGTERM: {', '.join(late)}")


def run(compose: dict[str, Any], folder: Path) -> None:
    """Everything, in order. Raises `Failure`."""
    services = swarm_services(compose)
    place = Place(folder, free_addresses(list(services), ports_in(list(services.values()))))
    under_way: list[Running] = []
    try:
        waiting = dict(services)
        healthy: set[str] = set()
        while waiting:
            batch = {name: one for name, one in waiting.items() if set(one.get("depends_on", ())) <= healthy}
            for name, service in batch.items():
                under_way.append(start(name, service, place))
            for name, service in batch.items():
                wait_healthy(next(one for one in under_way if one.name == name), service, place)
                healthy.add(name)
                del waiting[name]
        url = f"http://{place.addresses['gateway']}:8000"
        print(f"Question: {QUESTION}\nAnswer:   {chat(url)}")
        print(f"Prometheus: {check_targets(place)} targets answer", flush=True)
    finally:
        stop(under_way)
    print("All services left in order")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run docker/compose.yaml without Docker.")
    parser.add_argument("--keep-logs", type=Path, help="folder for what the services said")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="swarm-compose-"))
    try:
        run(yaml.safe_load((DOCKER / "compose.yaml").read_text()), folder)
    except Failure as failure:
        print(f"Error: {failure}", file=sys.stderr)
        return 1
    finally:
        if options.keep_logs is not None:
            options.keep_logs.mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy(log, options.keep_logs)
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
