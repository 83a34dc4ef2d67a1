"""Starts a swarm and a gateway, and tries programs of others with them, each in an environment of its own.

    python -m scripts.clients [PROGRAM ...] [--write]

Prints a table of what was tried and what works; with `--write`, puts it into docs/gateway.md. Exits with 1 if something
failed. Python's programs get a virtual environment each, those of Node a folder; all lie in artifacts/clients and are
used again. The model says the same sentence whatever it is asked, and has a long context, because agents send much.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.cli.local_swarm import LocalSwarm, PeerProcess
from tests.gateway.scripts import TEMPLATE
from tests.scripted import make_scripted

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ARTIFACTS = ROOT / "artifacts" / "clients"
PAGE = ROOT / "docs" / "gateway.md"
TABLE = re.compile(r"(?<=<!-- clients -->\n).*?(?=<!-- /clients -->)", re.DOTALL)

MODEL = "scripted"
ANSWER = "So it is, and so it shall be."
CONTEXT_TOKENS = 1 << 18
SPANS = ("0:2", "2:4", "4:6")
TIMEOUT_S = 900.0
"""For one program."""

PYTHON = {
    "openai": "openai==3.57.0",
    "anthropic": "anthropic==2.14.0",
    "ollama": "ollama==0.6.3",
    "langchain-openai": "langchain-openai==1.7.4",
    "langchain-anthropic": "langchain-anthropic==1.7.10",
    "langchain-ollama": "langchain-ollama==1.1.0",
    "litellm": "litellm==1.110.2",
    "llm": "llm==0.36",
    "instructor": "instructor==1.17.0",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.68.0",
    "openai-agents": "openai-agents==0.24.0",
    "llama-index": "llama-index-llms-openai-like==0.8.1",
    "dspy": "dspy==3.4.1",
    "aider": "aider-chat==0.86.2",
}
"""What pip installs for each program."""

NODE = "node"
"""Stands for all programs of Node."""


@dataclass(frozen=True)
class Outcome:
    """What was tried with one program.

    Attributes:
        failure: why it failed; None if it did not.
    """

    program: str
    version: str
    what: str
    failure: str | None


def tried_in_python(program: str, url: str) -> Iterator[Outcome]:
    """Install a program, and try it."""
    folder = ARTIFACTS / program
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PYTHON[program]]
    subprocess.run(pip, check=True)
    version = PYTHON[program].partition("==")[2]
    for told in _lines([python, HERE / "trials.py", program, url, MODEL, ANSWER], folder):
        yield Outcome(program, version, told["what"], told["failure"])


def tried_in_node(url: str) -> Iterator[Outcome]:
    """Install the programs of Node, and try them."""
    folder = ARTIFACTS / NODE
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "trials.mjs"):
        shutil.copy(HERE / name, folder)
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True)
    versions = json.loads((folder / "package.json").read_text())["dependencies"]
    for told in _lines(["node", "trials.mjs", url, MODEL, ANSWER], folder):
        name = told["program"]
        yield Outcome(f"{name}, Node", versions[name.partition(" ")[0]], told["what"], told["failure"])


def _lines(command: Sequence[str | Path], folder: Path) -> Iterator[dict[str, str]]:
    """What a program says of its trials. What else it prints goes into a file in its folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=log, text=True) as trying,
    ):
        timer = threading.Timer(TIMEOUT_S, trying.kill)
        timer.start()
        try:
            assert trying.stdout is not None
            yield from (json.loads(line) for line in trying.stdout if line.startswith("{"))
        finally:
            timer.cancel()
            trying.kill()


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown."""
    rows = [
        f"| {one.program} | {one.version} | {one.what} | {'yes' if one.failure is None else f'no: {one.failure}'} |"
        for one in outcomes
    ]
    return "\n".join(["| program | version | tried | works |", "| --- | --- | --- | --- |", *rows])


def scripted() -> Path:
    """A model that says one sentence, calls tools where it has to, and reads what agents send."""
    folder = ARTIFACTS / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    return make_scripted(folder, {"": ANSWER}, TEMPLATE, CONTEXT_TOKENS)


def main() -> int:
    """The exit code: 0 if everything works."""
    parser = argparse.ArgumentParser(prog="python -m scripts.clients")
    parser.add_argument("programs", nargs="*", choices=[*PYTHON, NODE, []], help="all of them without an argument")
    parser.add_argument("--write", action="store_true", help="put the table into docs/gateway.md")
    asked = parser.parse_args()
    wanted = asked.programs or [*PYTHON, *([NODE] if shutil.which("npm") else [])]
    outcomes: list[Outcome] = []
    folder = str(scripted())
    with LocalSwarm(folder, SPANS, options=("--threads", "1", "--cache-tokens", str(2 * CONTEXT_TOKENS))) as swarm:
        gateway = PeerProcess(("swarm.cli", "gateway", folder, "--initial-peers", swarm.address, "--port", "0"))
        url = gateway.wait_for(r"(http://\S+)/v1$")[1]
        for program in wanted:
            print(f"{program} ...", file=sys.stderr, flush=True)
            for one in tried_in_node(url) if program == NODE else tried_in_python(program, url):
                print(f"    {one.what}: {one.failure or 'works'}", file=sys.stderr, flush=True)
                outcomes.append(one)
        gateway.stop()
    print(table(outcomes))
    if asked.write:
        PAGE.write_text(TABLE.sub(lambda _: f"{table(outcomes)}\n", PAGE.read_text()))
    return int(any(one.failure is not None for one in outcomes) or not outcomes)


if __name__ == "__main__":
    sys.exit(main())
