"""What `docker/` and the pages about it say, checked without Docker."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import yaml

from scripts.compose_services import arguments_of, interpolated, swarm_services
from swarm.cli.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
FILES = sorted(DOCKER.glob("compose*.yaml"))
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "    swarm " in page.read_text()
]
IMAGE = re.compile(r"[\w./-]+:[\w.-]*\d[\w.-]*(?:@sha256:[0-9a-f]{64})?")


def services() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.name}/{name}", service)
        for path in FILES
        for name, service in yaml.safe_load(path.read_text())["services"].items()
    ]


def parse(words: list[str]) -> None:
    """Fail unless the words, without `swarm` in front, are a command that exists, with options that it has."""
    command: click.Command = main
    context = main.make_context("swarm", [], resilient_parsing=True)
    while isinstance(command, click.Group):
        assert words, f"{command.name} needs a command"
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
    with command.make_context(command.name, list(words), parent=context):
        pass


def commands_of(page: str) -> list[list[str]]:
    """Every `swarm ...` line of a page's code blocks, and every `docker run ... swarm:cpu ...`, without comments."""
    found = []
    for line in re.sub(r"\\\n\s*", "", page).splitlines():
        match = re.match(r"^(?: {4}|\$ )\s*(?:docker run .* swarm:\w+|(?:[A-Z_]+=\S+ )*swarm) (.+)$", line)
        if match:
            words = shlex.split(match[1].partition(" > ")[0].replace("...", "…"), comments=True)
            # An ellipsis stands for an option's value, or for further options.
            pairs = itertools.pairwise(["", *words])
            found.append([word for before, word in pairs if word != "…" or before.startswith("--")])
    return found


def test_dockerfile_is_clean():
    hadolint = Path(sys.executable).with_name("hadolint")
    checked = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_images_are_pinned():
    stages: set[str] = set()
    for base, stage in re.findall(r"^FROM (\S+)(?: AS (\S+))?$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE):
        assert base in stages or IMAGE.fullmatch(base), base
        stages.add(stage)
    for name, service in services():
        image = service.get("image", "swarm:")
        assert image.startswith("swarm:") or IMAGE.fullmatch(image), name


def test_no_service_may_gain_rights_or_write_its_root():
    for name, service in services():
        if "image" in service:
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
            assert "no-new-privileges:true" in service["security_opt"], name
            assert "privileged" not in service, name
            assert "user" not in service, name


def test_only_loopback_is_published():
    published = {name: service["ports"] for name, service in services() if "ports" in service}
    assert set(published) == {"compose.yaml/gateway", "compose.yaml/grafana"}
    for ports in published.values():
        assert all(interpolated(port).startswith("127.0.0.1:") for port in ports)


def test_mounts_exist():
    for path in FILES:
        compose = yaml.safe_load(path.read_text())
        for name, service in compose["services"].items():
            for mount in service.get("volumes", ()):
                source = mount.split(":")[0]
                known = (DOCKER / source).exists() if source.startswith(".") else source in {
                    *compose["volumes"], *COMPOSE["volumes"]
                }  # fmt: skip
                assert known, f"{path.name}/{name} mounts {source}, which is nowhere"


def test_commands_of_the_compose_files_parse():
    for _, service in services():
        words = arguments_of(service, "command")
        if service.get("image", "swarm:").startswith("swarm:"):
            shell = " ".join(arguments_of(service, "entrypoint"))
            front = ["keys"] if "swarm keys" in shell else []
            behind = ["--file", "/keys/keys.yaml"] if front else []
            parse([*front, *(interpolated(word) for word in words), *behind])


def test_commands_of_the_pages_parse():
    for page in PAGES:
        found = commands_of(page.read_text())
        assert found, "the page has commands, but none was recognized"
        for words in found:
            try:
                parse(words)
            except click.exceptions.Exit:
                pass
            except (click.ClickException, AssertionError) as error:
                raise AssertionError(f"{page.name}: swarm {shlex.join(words)}: {error}") from None


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.keys.yaml"]])
def test_compose_reads_the_files(files):
    options = [word for name in files for word in ("--file", str(DOCKER / name))]
    checked = subprocess.run(["docker-compose", *options, "config", "--quiet"], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode()


NOT_HAPPENED = {
    "gateway_refused", "client_hops_lost", "client_bans", "server_errors", "server_rebalances", "server_prefix_tokens",
    "client_exits", "client_exits_verified", "client_guesses", "client_audits", "server_exits", "dht_refused_records",
}  # fmt: skip
"""What the dashboard shows and a swarm that is well has none of, and what nobody asks for here: early exit, audits."""


@pytest.mark.slow
def test_every_command_runs_without_docker():
    command = [sys.executable, "-m", "scripts.compose_without_docker"]
    script = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children: set[psutil.Process] = set()
    try:
        assert script.stdout is not None
        said = ""
        for line in script.stdout:
            children.update(psutil.Process(script.pid).children(recursive=True))
            said += line
        _, errors = script.communicate(timeout=60)
    finally:
        script.terminate()  # it ends what it started
        script.wait()
    assert script.returncode == 0, errors
    for name in swarm_services(COMPOSE):
        assert f"{name}: healthy" in said
    assert re.search(r"^Answer: +\S", said, re.MULTILINE)
    assert "Prometheus: 5 targets answer" in said
    if shutil.which("prometheus") is not None:
        assert "prometheus: healthy" in said
        assert "Prometheus: all targets are up" in said
        silent = re.findall(r"without data.*\bswarm_(\w+)_total", said)
        assert set(silent) <= NOT_HAPPENED
    assert re.search(r"^With a key: +\S", said, re.MULTILINE)
    assert "All services left in order" in said
    assert len(children) > 5
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
