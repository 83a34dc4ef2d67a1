"""Monitor, page and `swarm status` over real servers, found from one address by the DHT alone."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner, Result
from playwright.sync_api import expect

from swarm.cli.__main__ import main
from swarm.cli.local_swarm import PeerProcess
from tests.browser import open_page, run_browser
from tests.swarms import TestSwarm, run_swarm
from tests.zoo import BLOCKS, make_checkpoint

# hivemind leaves connections to its own daemon to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

HOSTILE = "<img src=x onerror=document.title='taken'>\x1b[2J"


@pytest.fixture(autouse=True)
def _collect():
    yield
    gc.collect()  # while this module's filter holds


def status(swarm: TestSwarm, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["status", *arguments, "--initial-peers", swarm.address])


@pytest.mark.slow
def test_a_server_that_stops_leaves_a_gap_that_everybody_sees(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "tiny")
    half = BLOCKS // 2
    with run_swarm(folder, [f"0:{half}"], name="Ann's laptop", update_period=2.0) as swarm:
        second = swarm.start(f"{half}:{BLOCKS}", name=HOSTILE, update_period=2.0).wait_ready()

        whole = status(swarm)
        assert whole.exit_code == 0, whole.output
        assert f"tiny: {BLOCKS} blocks, 2 servers, complete" in whole.stdout
        assert "Ann's laptop" in whole.stdout
        assert "\x1b" not in whole.stdout
        seen = json.loads(status(swarm, "tiny", "--json").stdout)["models"][0]
        assert [server["peer_id"] for server in seen["servers"]] == [each.peer_id for each in swarm.servers]
        assert all(server["round_trip"] > 0 and not server["relayed"] for server in seen["servers"])

        arguments = ("swarm.monitor", "--initial-peers", swarm.address, "--port", "0")
        monitor = PeerProcess(arguments)
        try:
            url = monitor.wait_for(r"^Monitor: (\S+)")[1]
            daemons = [child.pid for child in psutil.Process(monitor.pid).children()]
            with run_browser() as browser, open_page(browser) as page:
                page.goto(url)
                expect(page.locator('.cells button:not([data-level="0"])')).to_have_count(BLOCKS)
                expect(page.locator("tbody th span")).to_have_text(["Ann's laptop", re.compile("^<img src=x.*�")])
                expect(page.locator("main img")).to_have_count(0)
                second.stop()
                expect(page.locator('.cells button[data-level="0"]')).to_have_count(BLOCKS - half)
                expect(page.get_by_role("alert")).to_contain_text(f"No server holds blocks {half}:{BLOCKS}")
            assert httpx.get(f"{url}api/v1/swarm").json()["models"][0]["complete"] is False
        finally:
            code = monitor.stop()
        assert code == 0, monitor.lines
        assert not any(psutil.pid_exists(pid) for pid in daemons)

        gap = status(swarm)
        assert gap.exit_code == 1
        missing = f"swarm server path/to/tiny --blocks {half}:{BLOCKS} --initial-peers {swarm.address}"
        assert missing in gap.stdout
