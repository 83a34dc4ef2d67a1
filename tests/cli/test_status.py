"""`swarm status`: exit codes, colors, JSON. Over a real swarm: tests/monitor/test_real_swarm.py."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarm.cli import status
from swarm.errors import PeerUnreachable
from swarm.monitor import swarm_poller
from swarm.monitor.swarm_view import AnnouncedModel
from swarm.routing.suspicion import Agreement, Suspicions
from swarm.trust.opinion_file import OpinionFile
from tests.infos import server_info
from tests.monitor.sources import DescribedSwarm, found

WHOLE = found(4, server_info(0, 4, "QmServer", name="Ann"))
GAP = found(4, server_info(0, 2), name="org/other")


def run(monkeypatch: pytest.MonkeyPatch, swarm: DescribedSwarm, *arguments: str) -> Result:
    monkeypatch.setattr(swarm_poller, "DhtSource", lambda peers, models, membership: swarm)
    return CliRunner().invoke(status.main, [*arguments, "--initial-peers", "/addr"])


@pytest.mark.parametrize(("models", "code"), [((WHOLE,), 0), ((WHOLE, GAP), 1), ((GAP,), 1), ((), 1)])
def test_the_exit_code_says_whether_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, models: tuple[AnnouncedModel, ...], code: int
) -> None:
    swarm = DescribedSwarm(*models)
    result = run(monkeypatch, swarm)
    assert result.exit_code == code, result.output
    assert swarm.closed
    assert "\x1b" not in result.output


def test_a_swarm_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = DescribedSwarm()
    swarm.error = PeerUnreachable("none of the initial peers answered: /addr")
    result = run(monkeypatch, swarm)
    assert result.exit_code == 2
    assert result.output == "Error: none of the initial peers answered: /addr\n"


def test_without_a_swarm() -> None:
    result = CliRunner(env={"SWARM_INITIAL_PEERS": ""}).invoke(status.main, [])
    assert result.exit_code == 2
    assert "no swarm to show" in result.output


def test_what_audits_say_of_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "opinions.json"
    told = ("--opinions", str(path))
    assert "audits" not in run(monkeypatch, DescribedSwarm(WHOLE)).output
    assert "a client writes it after its first audit" in run(monkeypatch, DescribedSwarm(WHOLE), *told).output
    suspicions = Suspicions()
    for agreement in (Agreement.SAME, Agreement.SAME, Agreement.UNRELATED):
        suspicions.record("QmServer", agreement, time.monotonic())
    asyncio.run(OpinionFile(path).save(suspicions))
    result = run(monkeypatch, DescribedSwarm(WHOLE), *told)
    assert result.exit_code == 0
    assert "audits" in result.output
    assert "2 of 3 agree, not used" in result.output


def test_json_is_one_line_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, DescribedSwarm(WHOLE), "--json")
    assert result.exit_code == 0
    assert result.output.count("\n") == 1
    assert json.loads(result.output)["models"][0]["servers"][0]["name"] == "Ann"


@pytest.mark.parametrize(
    ("terminal", "no_color", "colored"), [(True, None, True), (True, "1", False), (False, None, False)]
)
def test_colours_only_for_people_who_want_them(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str | None, colored: bool
) -> None:
    monkeypatch.setattr(status, "_on_terminal", lambda: terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    result = CliRunner()
    monkeypatch.setattr(swarm_poller, "DhtSource", lambda peers, models, membership: DescribedSwarm(WHOLE))
    output = result.invoke(status.main, ["--initial-peers", "/addr"], color=True).output
    assert ("\x1b[" in output) is colored


def test_it_looks_again_until_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "PERIOD_S", 0.01)

    class Interrupted(DescribedSwarm):
        async def poll(self, remembered):
            if self.looks == 3:
                raise KeyboardInterrupt
            return await super().poll(remembered)

    result = run(monkeypatch, Interrupted(WHOLE), "--watch")
    assert result.exit_code == 130
    assert result.output.count("org/model") == 3
