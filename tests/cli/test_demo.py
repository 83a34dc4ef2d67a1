"""`swarm demo`, also when it is interrupted or killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.slow import slow_except
from tests.waiting import wait_until

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
DEMO = [sys.executable, "-m", "swarm.cli", "demo"]


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def test_three_servers_write_what_the_model_alone_writes() -> None:
    """Whatever swarm this machine's owner takes part in."""
    result = subprocess.run(
        DEMO,
        env={**os.environ, "SWARM_INITIAL_PEERS": NOBODY},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    spans = re.findall(r"server …\w{6} holds blocks (\S+) \(process \d+\)", result.stdout)
    assert spans == ["0:4", "4:8", "8:12"]
    assert re.search(r"route: 0:4 …\w{6} → 4:8 …\w{6} → 8:12 …\w{6}", result.stdout)
    assert "travel as computed (wire=none), 768 bytes a token" in result.stdout
    assert "the model's default, blockwise8, takes 196" in result.stdout
    assert "Once upon a time" in result.stdout
    assert re.search(r"120 tokens in \S+ s: \d+ tokens/s through three servers", result.stdout)
    assert "All 120 tokens equal the local model's." in result.stdout


@pytest.mark.parametrize("number", slow_except([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], signal.SIGINT))
def test_an_ended_demo_leaves_nothing_running(number: signal.Signals) -> None:
    with subprocess.Popen(
        DEMO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        wait_until(lambda: len(descendants(process.pid)) >= 4)
        children = descendants(process.pid)
        os.kill(process.pid, number)
        process.communicate(timeout=60)
        assert process.returncode == (-number if number == signal.SIGKILL else 130)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


def test_the_demo_can_be_tried_until_it_is_interrupted() -> None:
    """A chat page, the monitor, answers with and without a tool, and the examples of the documentation."""
    with subprocess.Popen([*DEMO, "--serve", "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("Chat in your browser"))
        children = descendants(process.pid)
        url = line.split()[-1].rstrip("/")
        assert "<title>" in httpx.get(url).text
        assert httpx.get(f"{url}/monitor/").status_code == 200
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
            asked: Any = {"model": "swarm-demo", "messages": [{"role": "user", "content": "Who are you?"}]}
            assert client.chat.completions.create(max_tokens=8, **asked).choices[0].message.content
            tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
            reply = client.chat.completions.create(tools=[tool], tool_choice="required", max_tokens=60, **asked)
            assert [call.function.name for call in reply.choices[0].message.tool_calls or ()] == ["look"]
        for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            code = example.replace("http://127.0.0.1:8000", url)
            printed = subprocess.run(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120, check=True
            ).stdout
            assert printed.strip()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
