"""`swarm chat` with a real model of a real swarm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.scripted import make_scripted
from tests.swarms import run_swarm
from tests.terminals import at_terminal

HELLO = "Good day to you, whoever you are."
EVIL = "look \x1b[2J\x1b]52;c;aGVsbG8=\x07 here \x9b31m and \rthere, \u202eover"
LONG = " ".join(f"word{number}" for number in range(700))
SCRIPTS = {"hello": HELLO, "evil": EVIL, "long": LONG, "": "What do you mean?"}
CHAT = ("-m", "swarm.cli", "chat")


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory):
    model = make_scripted(tmp_path_factory.mktemp("scripted") / "parrot", SCRIPTS)
    with run_swarm(model, ("0:3", "3:6"), name="ann's laptop") as running:
        yield running


@pytest.fixture(scope="module")
def way(swarm):
    """The arguments that choose the model and the swarm."""
    return (swarm.model, "--initial-peers", swarm.address)


def run(arguments: Sequence[str], lines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *CHAT, *arguments],
        input=lines,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


def test_each_line_of_a_script_is_a_message(way, tmp_path: Path):
    saved = tmp_path / "talk.json"
    lines = f"say hello\n\nbe evil\n/route\n//hello\n/save {saved}\n/quit\nnever asked\n"
    settings = ("--system", "Be kind.", "--temperature", "0", "--early-exit", "0.1")
    done = run((*way, *settings), lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{HELLO}\nlook [2J]52;c;aGVsbG8= here 31m and there, over\n{HELLO}\n"
    footer = r"^\d+ tokens in \d+\.\d s, \d+\.\d tokens/s · 0:3 …\w{6} \(ann's laptop\) → 3:6 …\w{6} \(ann's laptop\)$"
    assert len(re.findall(footer, done.stderr, re.MULTILINE)) == 3
    assert len(re.findall(r"^0:3 …\w{6} \(ann's laptop\)$", done.stderr, re.MULTILINE)) == 1
    said = json.loads(saved.read_text())
    assert [message["role"][0] for message in said] == list("suauaua")
    assert said[-1] == {"role": "assistant", "content": HELLO}


def test_input_that_is_not_utf_8_is_told_and_the_next_line_answered(way, tmp_path: Path):
    saved = tmp_path / "talk.json"
    lines = f"caf\udce9\nsay hello\n/save {saved}\n/save {tmp_path}/\0\n"
    done = run((*way, "--system", "Be k\udcefnd."), lines, PYTHONIOENCODING="utf-8:strict")
    assert (done.returncode, done.stdout) == (2, f"{SCRIPTS['']}\n{HELLO}\n"), done.stderr
    assert "--system is not UTF-8; \ufffd stands for what cannot be read. Convert it" in done.stderr
    assert done.stderr.count("This line is not UTF-8") == 1
    assert done.stderr.endswith("cannot be written: embedded null byte\n")
    said = [message["content"] for message in json.loads(saved.read_text())]
    assert said == ["Be k\ufffdnd.", "caf\ufffd", SCRIPTS[""], "say hello", HELLO]


def test_keys_that_are_not_utf_8_are_told(way):
    with at_terminal((*CHAT, *way), PYTHONIOENCODING="utf-8") as screen:
        screen.wait_for("> ")
        screen.type("caf\udcff now\n")
        screen.wait_for("This line is not UTF-8")
        screen.wait_for(r"tokens/s.*\n> ")
        screen.type("say hello\n")
        screen.wait_for(re.escape(HELLO))
        screen.wait_for(r"tokens/s.*\n> ")
        screen.type("/quit\n")
        assert screen.wait_end() == 0


def test_ctrl_c_stops_the_answer_and_not_the_conversation(way):
    with at_terminal((*CHAT, *way)) as screen:
        screen.wait_for(r"parrot\. /help lists commands.*\n> ")
        screen.type("tell me long\n")
        screen.wait_for("word20")
        screen.type("\x03")
        screen.wait_for(r"stopped; /retry answers again\n> ")
        assert "word699" not in screen.seen
        # At the prompt it deletes the line, and interrupts nothing.
        screen.type("no such thing\x03")
        screen.type("say hello\n")
        screen.wait_for(re.escape(HELLO) + r"\n\d+ tokens in .* · 0:3 …\w{6}.*\n> ")
        screen.type("/retry\n")
        screen.wait_for(re.escape(HELLO) + r"\n\d+ tokens.*\n> ")  # what is typed before the prompt means nothing
        screen.type("/nonsense\n")
        screen.wait_for("Error: there is no command /nonsense")
        screen.type("/help\n")
        screen.wait_for("/clear +start a new conversation")
        screen.wait_for(r"\n> ")  # the end of the input means nothing before the prompt
        children = psutil.Process(screen.process.pid).children(recursive=True)
        screen.type("\x04")
        assert screen.wait_end() == 0
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    assert b"\x1b[2m" in screen.raw  # what is not the answer is faint


def test_line_history_and_no_color(way):
    with at_terminal((*CHAT, *way), NO_COLOR="1") as screen:
        screen.wait_for("> ")
        screen.type("say hello\n")
        screen.wait_for(r"tokens/s.*\n> ")
        screen.type("\x1b[A\n")
        screen.wait_for(re.escape(HELLO))
        screen.wait_for(r"tokens/s.*\n> ")
        screen.type("/quit\n")
        assert screen.wait_end() == 0
    assert b"\x1b[2m" not in screen.raw


@pytest.mark.slow
def test_a_server_that_dies_is_a_notice(way, swarm):
    swarm.start("3:6", name="spare").wait_ready()
    with at_terminal((*CHAT, *way)) as screen:
        screen.wait_for("> ")
        screen.type("tell me long\n")
        screen.wait_for("word20")
        victim = _behind(swarm)
        victim.kill()
        screen.wait_for("with blocks 3:6 failed; looking for another server")
        screen.wait_for(r"continuing after \d+\.\d s")
        screen.wait_for("word699")
        screen.wait_for("tokens/s")


def _behind(swarm):
    """The server of 3:6 that has the open session: the one that uses the processor."""
    deadline = time.monotonic() + 60
    holders = swarm.holders("3:6")
    before = {holder.pid: psutil.Process(holder.pid).cpu_times().user for holder in holders}
    while time.monotonic() < deadline:
        used = {holder.pid: psutil.Process(holder.pid).cpu_times().user - before[holder.pid] for holder in holders}
        busiest = max(holders, key=lambda holder: used[holder.pid])
        if used[busiest.pid] > 0.2:
            return busiest
        time.sleep(0.02)
    raise AssertionError("no server works")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "a swarm is required: give --initial-peers ADDRESS..."),
        (("--initial-peers", "/ip4/127.0.0.1/tcp/1"), 2, "does not end in /p2p/PEER_ID"),
    ],
)
def test_a_swarm_is_required(arguments, code, message):
    done = run(arguments, "hello\n", SWARM_INITIAL_PEERS="")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_failure_ends_a_script(way):
    done = run((*way, "--max-tokens", "100000"), "hello\nhello\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("leaves room for") == 1
