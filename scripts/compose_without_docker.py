"""Runs the swarm of docker/compose*.yaml without Docker: every command, health check and metrics target of the files.

Each service gets a loopback address of its own (127.x.y.z) in the place of its container, so names become addresses and
ports stay as they are. Volumes are temporary folders. A message goes through the gateway, then through one with keys,
and all processes are ended. Where a Prometheus is installed it runs too, sees every target, and is asked what Grafana's
dashboard asks; elsewhere its targets are only read. Grafana itself is not run.

    python -m scripts.compose_without_docker [--keep-logs FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.compose_services import (
    Failure,
    Place,
    arguments_of,
    environment_of,
    expressions,
    free_addresses,
    load,
    load_dashboard,
    merged,
    mounts_of,
    ports_in,
    prometheus_service,
    swarm_services,
)

START_TIMEOUT_S = 300.0
"""Seconds within which a service has to become healthy."""
LEAVE = 15.0
QUESTION = "Once upon a time"


@dataclass
class Running:
    """A running service."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        return "\n    ".join(self.log.read_text(errors="replace").splitlines()[-15:])


def start(name: str, service: dict[str, Any], place: Place) -> Running:
    mounts = mounts_of(service, name, place)
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
    mounts = mounts_of(service, running.name, place)
    command = [place.translated(word, running.name, mounts) for word in words]
    deadline = time.monotonic() + START_TIMEOUT_S
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
            raise Failure(
                f"{running.name} did not become healthy in {START_TIMEOUT_S:.0f} s: {why}\n    {running.tail()}"
            )
        time.sleep(1.0)


def chat(url: str, key: str = "") -> str:
    """Send a message through the gateway; returns the answer. Raises `HTTPError` if it is refused."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=30) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    if answer["usage"]["completion_tokens"] < 1:
        raise Failure(f"the gateway answered with no token: {answer}")
    return str(answer["choices"][0]["message"]["content"])


def check_refused(url: str) -> None:
    """Raise `Failure` unless the gateway asks for a key."""
    try:
        chat(url)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 401:
                return
    raise Failure("a gateway with keys answered without one")


def once(name: str, service: dict[str, Any], place: Place, *words: str) -> str:
    """Run a service to its end, with these words as its command; what it printed. Raises `Failure`."""
    mounts = mounts_of(service, name, place)
    command = [place.translated(word, name, mounts) for word in (*arguments_of(service, "entrypoint"), *words)]
    print(f"{name}: {shlex.join(words)}", flush=True)
    done = subprocess.run(
        command,
        env=environment_of(service, place, name),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise Failure(f"{name} {' '.join(words)} ended with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def check_targets(place: Place) -> int:
    """Read what Prometheus would read; how many targets there are. Raises `Failure`."""
    config = load("prometheus/prometheus.yml")
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


def ask_prometheus(url: str, path: str, **query: str) -> Any:
    """The data of an answer of Prometheus. Raises `Failure` with its own words if it refuses."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        with error:
            raise Failure(f"Prometheus refuses {query or path}: {error.read().decode(errors='replace')}") from None


def check_prometheus(url: str, targets: int) -> None:
    """Wait until Prometheus has seen every target twice, then ask what the dashboard asks. Raises `Failure`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        seen = ask_prometheus(url, "query", query="count_over_time(up[1m])")["result"]
        if len(seen) == targets and all(int(one["value"][1]) >= 2 for one in seen):
            break
        if time.monotonic() > deadline:
            raise Failure(f"Prometheus has seen {len(seen)} of {targets} targets in {START_TIMEOUT_S:.0f} s")
        time.sleep(1.0)
    down = [one["metric"]["instance"] for one in ask_prometheus(url, "query", query="up == 0")["result"]]
    if down:
        raise Failure(f"Prometheus cannot read {', '.join(down)}")
    asked = expressions(load_dashboard())
    silent = [one for one in asked if not ask_prometheus(url, "query", query=one)["result"]]
    print(f"Prometheus: all targets are up; {len(asked)} expressions of the dashboard are understood", flush=True)
    for one in silent:
        print(f"    without data, as nothing of the kind has happened: {one}", flush=True)


def stop(services: list[Running]) -> None:
    """End all processes, the last one first; a process that does not end in time is killed and reported."""
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


def run(folder: Path) -> None:
    """Run all checks in order. Raises `Failure`."""
    compose, with_keys = load("compose.yaml"), load("compose.keys.yaml")
    services = swarm_services(compose)
    names = [*dict.fromkeys([*services, *with_keys["services"], "prometheus"])]
    ports = ports_in([*services.values(), prometheus_service(compose)])
    place = Place(folder, free_addresses(names, ports))
    url = f"http://{place.addresses['gateway']}:8000"
    under_way: dict[str, Running] = {}
    try:
        start_all(services, place, under_way)
        print(f"Question: {QUESTION}\nAnswer:   {chat(url)}")
        targets = check_targets(place)
        print(f"Prometheus: {targets} targets answer", flush=True)
        if shutil.which("prometheus") is None:
            print("Prometheus is not installed here, so its own command is not run", flush=True)
        else:
            start_all({"prometheus": prometheus_service(compose)}, place, under_way)
            check_prometheus(f"http://{place.addresses['prometheus']}:9090", targets)

        keys = with_keys["services"]["keys"]
        secret = once("keys", keys, place, "add", "ann")
        once("keys", keys, place, *arguments_of(keys, "command"))
        stop([under_way.pop("gateway")])
        gateway = merged(services["gateway"], with_keys["services"]["gateway"])
        start_all({"gateway": gateway | {"depends_on": ()}}, place, under_way)
        check_refused(url)
        print(f"With a key: {chat(url, secret)}")
        check_targets(place)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")
        raise Failure(f"{error.url}: {error.code} {said}\n    {under_way['gateway'].tail()}") from None
    finally:
        stop(list(under_way.values()))
    print("All services left in order")


def start_all(services: dict[str, dict[str, Any]], place: Place, under_way: dict[str, Running]) -> None:
    """Start services as soon as those that they depend on are healthy; they are put into `under_way`."""
    waiting = dict(services)
    while waiting:
        batch = {name: one for name, one in waiting.items() if not set(one.get("depends_on", ())) & set(waiting)}
        for name, service in batch.items():
            under_way[name] = start(name, service, place)
        for name, service in batch.items():
            wait_healthy(under_way[name], service, place)
            del waiting[name]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run docker/compose*.yaml without Docker.")
    parser.add_argument("--keep-logs", type=Path, help="folder for what the services said")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended then, too
    folder = Path(tempfile.mkdtemp(prefix="swarm-compose-"))
    try:
        run(folder)
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
