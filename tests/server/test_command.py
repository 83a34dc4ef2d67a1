"""`python -m swarm.server` as a person meets it: what it says, how it refuses, how it leaves."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from tests.slow import slow_except
from tests.swarms import FORKS
from tests.waiting import TIMEOUT_S
from tests.zoo import make_checkpoint

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
LISTEN = ("--host-maddrs", LOOPBACK)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "model")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    """Start commands; whatever still runs at the end is ended."""
    started: list[PeerProcess] = []

    def run(*arguments: str, **environment: str) -> PeerProcess:
        started.append(PeerProcess(arguments, {"HF_HUB_OFFLINE": "1", **environment}))
        return started[-1]

    yield run
    for process in started:
        process.stop()


def daemons_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def leave(server: PeerProcess) -> float:
    """Ask a server to leave, which it has to do in good order. How many seconds it takes."""
    began = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(TIMEOUT_S) == 0
    return time.monotonic() - began


def test_a_server_says_what_it_does_and_leaves_when_asked(folder: Path, start) -> None:
    began = time.monotonic()
    server = start("swarm.server", str(folder), "--blocks", "1:4", "--new-swarm", *LISTEN, SWARM_INITIAL_PEERS=NOBODY)
    address = server.address()
    starting_s = time.monotonic() - began
    client = server.wait_for(r"^Client: (.*)$")[1]
    assert address in client
    assert str(folder) in client
    said = "\n".join(server.lines)
    beginnings = (
        "Model: model, revision folder-",
        "Device: cpu, computing in ",
        "Peer: ",
        "Blocks: 1:4, as asked for",
        "Loaded: ",
        "Throughput: ",
        "Attention cache: room for 16384 tokens",
    )
    assert "--new-swarm overrides SWARM_INITIAL_PEERS" in said
    for beginning in beginnings:
        assert f"\n{beginning}" in f"\n{said}"
    ready = server.lines.index("Ready: serving blocks 1:4 of model")
    assert next(n for n, line in enumerate(server.lines) if line.startswith("Join:")) > ready
    children = daemons_of(server.pid)
    assert [child.name() for child in children] == ["p2pd"]

    joined = start("swarm.server", str(folder), "--blocks", "auto", *LISTEN, SWARM_INITIAL_PEERS=address)
    assert joined.wait_for(r"^Ready: serving blocks 0:6 of model$")
    assert joined.wait_for(r"^Memory: .* free, enough for 6 of 6 blocks")
    assert joined.wait_for(r"^Blocks: 0:6, because no server has some of them yet")

    assert leave(server) < starting_s  # nobody uses it, so it waits for nobody
    assert "Leaving the swarm" in server.lines
    _, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
    assert not alive


LOADS_FOR_EVER = """
import torch
from swarm.server import span_service
from swarm.server.__main__ import main

def load_span(*args, **kwargs):
    print("computing", flush=True)
    numbers = torch.randn(500, 500)
    while True:
        torch.mm(numbers, numbers)

span_service.load_span = load_span
main()
"""


def test_it_leaves_in_good_order_while_its_compute_thread_is_inside_torch(folder: Path, start, tmp_path: Path) -> None:
    """And is not aborted by Python, which ends daemon threads where they are."""
    (tmp_path / "server_that_loads_for_ever.py").write_text(LOADS_FOR_EVER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = (str(folder), "--blocks", "1:4", "--new-swarm", *LISTEN)
    server = start("server_that_loads_for_ever", *arguments, PYTHONPATH=path)
    server.wait_for("^computing$")
    leave(server)
    assert not any("terminate called" in line for line in server.lines)


@pytest.mark.slow
def test_a_server_that_lost_its_daemon_says_so_and_ends(folder: Path, start) -> None:
    server = start("swarm.server", str(folder), "--blocks", "0:2", "--new-swarm", *LISTEN)
    server.address()
    [daemon] = daemons_of(server.pid)
    daemon.kill()
    assert server.wait(TIMEOUT_S) == 1
    assert any(line.startswith("Error: the libp2p daemon of this server has ended") for line in server.lines)


@pytest.mark.slow
def test_a_start_removes_the_folder_of_a_server_that_was_killed(folder: Path, start) -> None:
    with tempfile.TemporaryDirectory(prefix="swp-", dir="/tmp") as temporary:  # short, because sockets lie in it
        arguments = ("swarm.server", str(folder), "--blocks", "0:2", "--new-swarm", *LISTEN)
        killed = start(*arguments, TMPDIR=temporary)
        killed.wait_for("^Ready: serving blocks 0:2 of model$")
        [left] = Path(temporary).glob("swarm-*")
        daemons = daemons_of(killed.pid)
        killed.kill()
        for daemon in daemons:
            daemon.kill()
        assert left.exists()
        started = start(*arguments, TMPDIR=temporary)
        started.wait_for("^Removed the temporary folders of killed processes: 1$")
        started.wait_for("^Ready: serving blocks 0:2 of model$")
        assert not left.exists()
        leave(started)
        assert not [*Path(temporary).glob("swarm-*")]


def refusal(folder: Path, *arguments: str) -> str:
    """Run a command that must fail: exit code 2 and one line, which is returned.

    In a fork, which need not import everything again.
    """
    out, errors = folder / "out", folder / "errors"
    process = FORKS.Process(target=_run_command, args=(arguments, out, errors))
    process.start()
    process.join(TIMEOUT_S)
    try:
        group = [child for child in psutil.process_iter(["pid"]) if _group_of(child) == process.pid]
        assert process.exitcode == 2, out.read_text() + errors.read_text()
        assert not group, "something was left running"
    finally:
        process.kill()
        process.join()
    lines = [line for line in errors.read_text().splitlines() if line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: ")
    return lines[0]


def _run_command(arguments: tuple[str, ...], out: Path, errors: Path) -> None:
    os.setsid()
    for file, number in ((out, 1), (errors, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("SWARM_INITIAL_PEERS", None)
    sys.argv = ["swarm.server", *arguments]
    runpy.run_module("swarm.server", run_name="__main__", alter_sys=True)


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nobody/has-this-model", "--new-swarm"), "the model hub cannot be reached"),
        (("{folder}",), "--new-swarm starts one"),
        (("{folder}", "--new-swarm", "--blocks", "4:9"), "do not lie inside model, which has blocks 0:6"),
        (("{folder}", "--new-swarm", "--dtype", "int3"), "dtype 'int3' is not one of auto, float32"),
        (("{folder}", "--initial-peers", NOBODY), "none of the initial peers answered"),
        (("{pickled}", "--new-swarm"), "has no safetensors weights"),
        *slow_except(
            [
                (("{folder}", "--new-swarm", "--initial-peers", NOBODY), "contradict each other"),
                (("{folder}", "--new-swarm", "--blocks", "3:3"), "START < END"),
                (("{folder}", "--new-swarm", "--blocks", "7"), "the model has 6 blocks"),
                (("{folder}", "--new-swarm", "--blocks", "some"), "use auto, START:END"),
                (("{folder}", "--new-swarm", "--cache-tokens", "999999999999"), "ask for fewer blocks"),
                (("{folder}", "--new-swarm", "--device", "cuda:7"), "--device cuda:7: torch cannot use it here"),
                (("{folder}", "--new-swarm", "--throughput", "-3"), "--throughput '-3'"),
                (("{folder}", "--initial-peers", "localhost:80"), "is not a valid multiaddress"),
                (("{folder}", "--new-swarm", "--host-maddrs", "{taken}"), "another program is listening there"),
                (
                    ("{folder}", "--new-swarm", "--identity-path", "{folder}/config.json"),
                    "does not hold a libp2p RSA key",
                ),
                (("{t5}", "--new-swarm"), "'t5' cannot be served: it is an encoder-decoder"),
            ],
            unpack=True,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    for name in ("pickled", "t5"):
        (tmp_path / name).mkdir()
    (tmp_path / "pickled" / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"never opened")
    (tmp_path / "t5" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {
            "folder": folder,
            "taken": f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}",
            "pickled": tmp_path / "pickled",
            "t5": tmp_path / "t5",
        }
        filled = [argument.format(**names) for argument in arguments]
        listen = () if "--host-maddrs" in filled else LISTEN
        blocks = () if "--blocks" in filled else ("--blocks", "0:2")
        assert says in refusal(tmp_path, *filled, *blocks, *listen)


@pytest.mark.slow
def test_memory_stays_near_what_the_weights_take(folder: Path, tmp_path: Path, start) -> None:
    """Beside a tiny model's server, that of a large model takes its blocks, once, and nothing else of the model."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16, vocab_size=8000
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "large")
    block = 2 * (4 * 2048 * 2048 + 3 * 2048 * 4096 + 2 * 2048)

    def resident(model: Path) -> int:
        server = start("swarm.server", str(model), "--blocks", "1:3", "--new-swarm", *LISTEN, "--threads", "1")
        server.address()
        return psutil.Process(server.pid).memory_info().rss

    assert round((resident(tmp_path / "large") - resident(folder)) / block) == 2


@pytest.mark.slow
def test_it_says_how_busy_the_machine_was_while_throughput_was_measured(folder, start):
    loop = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(loop) for _ in range(psutil.cpu_count() or 1)]
    try:
        server = start("swarm.server", str(folder), "--new-swarm", *LISTEN)
        measured = server.wait_for(r"^Throughput: .*; measured, while others used (\d+)% of the processors$")
        assert int(measured[1]) > 20
    finally:
        for other in others:
            other.kill()
            other.wait()
