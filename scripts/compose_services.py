"""Reads the compose files in docker/ as services of this machine instead of containers."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[1] / "docker"
IMAGE = "swarm:"


class Failure(Exception):
    """A compose file does not do what it should; one line says where."""


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


def load(name: str) -> dict[str, Any]:
    """One of the files in docker/."""
    return dict(yaml.safe_load((DOCKER / name).read_text()))


def load_dashboard() -> dict[str, Any]:
    """Grafana's dashboard."""
    return dict(json.loads((DOCKER / "grafana/dashboards/swarm.json").read_text()))


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """The Prometheus queries of its panels, with Grafana's variables set to all servers and the last minute."""
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [one.replace("$__rate_interval", "1m").replace("$instance", ".*") for one in asked]


def merged(service: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge a service that is defined in two files, as Compose does."""
    return {**service, **more, "volumes": [*service.get("volumes", ()), *more.get("volumes", ())]}


def interpolated(text: str) -> str:
    """Substitute `${NAME:-default}` and `$$` as Compose does when no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


def swarm_services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The services that run a command of this package, dependencies first."""
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


def mounts_of(service: dict[str, Any], name: str, place: Place) -> dict[str, Path]:
    """Target of each volume of a service, and what stands in for it: a folder, or a file with our addresses."""
    found = {}
    for entry in service.get("volumes", ()):
        source, target = entry.split(":")[:2]
        if source.startswith("."):
            found[target] = place.folder / source.removeprefix("./").replace("/", "-")
            found[target].write_text(place.translated((DOCKER / source).read_text(), name, {}))
        else:
            found[target] = place.folder / f"volume-{source}"
            found[target].mkdir(mode=0o700, exist_ok=True)
    return found


def prometheus_service(compose: dict[str, Any]) -> dict[str, Any]:
    """Prometheus with this machine's program in the place of its image; what it listens on is the image's default."""
    service = compose["services"]["prometheus"]
    return {
        **service,
        "entrypoint": ["prometheus"],
        "command": [*service["command"], "--web.listen-address=0.0.0.0:9090"],
    }


def environment_of(service: dict[str, Any], place: Place, name: str) -> dict[str, str]:
    """What the image and the service set, and the place of this interpreter's own commands."""
    mounts = mounts_of(service, name, place)
    cache = mounts.get("/cache", place.folder)
    # Without a value, a variable is handed on as it is here.
    stated = {key: value for key, value in service.get("environment", {}).items() if value is not None}
    given = {key: place.translated(str(value), name, mounts) for key, value in stated.items()}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(cache), **given}


def arguments_of(service: dict[str, Any], key: str) -> list[str]:
    value = service.get(key, ["swarm"] if key == "entrypoint" else [])
    return shlex.split(value) if isinstance(value, str) else [str(part) for part in value]
