"""Progress bars and log lines, on a terminal and on a pipe; options that commands share."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
import termios
import threading
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from swarm.common import console
from swarm.common.console import MAX_RELAYED_PEERS
from swarm.errors import InvalidOption


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(console, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))
    return stream


def test_progress_on_a_terminal(terminal):
    assert list(console.iterate_with_progress(range(3), "Counting", "number")) == [0, 1, 2]
    assert "Counting" in terminal.getvalue()
    assert "0/3" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


def test_no_bar_on_a_pipe_and_nothing_about_what_is_quick(capsys, caplog):
    with caplog.at_level(logging.INFO):
        assert list(console.iterate_with_progress(range(3), "Counting", "number")) == [0, 1, 2]
        with console.progress_bar("Counting", 3, "number") as bar:
            bar.update()
    assert capsys.readouterr().err == ""
    assert caplog.text == ""


def test_lines_in_the_log_where_there_is_no_terminal(monkeypatch, caplog):
    """A line whenever ten seconds have passed since the last one, and none about what is done."""
    now = 100.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.INFO), console.progress_bar("Writing", 5 * 10**9, "B") as bar:
        for _ in range(10):
            now += 4
            bar.update(5 * 10**8)
    assert caplog.messages == [
        "Writing: 1.5 GB of 5 GB, about 28 s left",
        "Writing: 3 GB of 5 GB, about 16 s left",
        "Writing: 4.5 GB of 5 GB, about 4 s left",
    ]


def test_how_far_work_has_come_in_words():
    for done, total, unit, seconds, text in [
        (3, 8, "block", 60, "3 of 8 blocks, about 2 min left"),
        (7, 8, "block", 70, "7 of 8 blocks, about 10 s left"),
        (0, 8, "block", 70, "0 of 8 blocks"),
        (10**6, 10**9, "B", 10, "1 MB of 1 GB, about 166 min left"),
    ]:
        assert console.progress_text(done, total, unit, seconds) == text


def test_a_bar_is_removed_when_its_work_fails(terminal):
    def work() -> None:
        for _ in console.iterate_with_progress(range(3), "Counting", "number"):
            raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        work()
    assert terminal.getvalue().endswith("\r")


CODE = """
import logging
from swarm.common import console
console.configure_logging()
for number in console.iterate_with_progress(range(3), "Counting", "number"):
    logging.getLogger("swarm.test").info("line %d", number)
"""


def run(stderr: int) -> str:
    """What the code writes to stdout, with stderr going to a file descriptor."""
    return subprocess.run(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=stderr, check=True, text=True
    ).stdout


def test_log_lines_are_whole_lines_beside_a_bar():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 1000):
                shown.append(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert run(theirs) == "line 0\nline 1\nline 2\n"
    finally:
        os.close(theirs)
        reader.join(60)
        os.close(ours)
    assert b"Counting" in b"".join(shown)


@pytest.fixture
def own_logging(monkeypatch) -> Iterator[None]:
    """What a test sets up leaves with it."""
    root, swarm = logging.getLogger(), logging.getLogger("swarm")
    level = swarm.level
    for logger in (root, swarm):
        monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(swarm, "propagate", swarm.propagate)
    yield
    logging.captureWarnings(False)
    swarm.setLevel(level)


@pytest.mark.usefixtures("own_logging")
def test_log_lines_replace_earlier_handlers():
    console.configure_logging()
    logger = logging.getLogger("swarm")
    assert len(logger.handlers) == 1
    assert isinstance(logger.handlers[0], logging.StreamHandler)


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """One a line, and nothing else."""
    captured = capsys.readouterr()
    assert captured.err == ""
    return [json.loads(line) for line in captured.out.splitlines()]


@pytest.mark.usefixtures("own_logging")
def test_json_has_a_time_a_level_a_logger_a_message_and_what_the_code_gives(capsys):
    before = datetime.now(UTC)
    console.configure_logging("json")
    logging.getLogger("swarm.test").info("peer %s — “here”\nand there", "ann", extra={"blocks": "0:4", "seconds": 0.5})
    [line] = objects(capsys)
    assert list(line) == ["time", "level", "logger", "message", "blocks", "seconds"]
    assert line["time"].endswith("Z")
    assert before - timedelta(milliseconds=1) <= datetime.fromisoformat(line["time"]) <= datetime.now(UTC)
    assert (line["level"], line["logger"]) == ("INFO", "swarm.test")
    assert line["message"] == "peer ann — “here”\nand there"
    assert (line["blocks"], line["seconds"]) == ("0:4", 0.5)


@pytest.mark.usefixtures("own_logging")
def test_json_has_an_exception_as_one_field(capsys):
    console.configure_logging("json")
    try:
        raise ValueError("of the test")
    except ValueError:
        logging.getLogger("swarm.test").exception("it failed")
    [line] = objects(capsys)
    assert (line["level"], line["message"]) == ("ERROR", "it failed")
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: of the test")


@pytest.mark.usefixtures("own_logging")
def test_extra_fields_do_not_replace_a_line_s_own(capsys):
    console.configure_logging("json")
    own = {"time": "never", "level": "none", "logger": "other", "exception": "of a peer", "stack": "none"}
    try:
        raise ValueError("of the test")
    except ValueError:
        logging.getLogger("swarm.test").exception("it failed", extra=own, stack_info=True)
    [line] = objects(capsys)
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "swarm.test", "it failed")
    assert line["time"].endswith("Z")
    assert line["exception"].endswith("ValueError: of the test")
    assert line["stack"].startswith("Stack (most recent call last)")
    assert "test_extra_fields_do_not_replace" in line["stack"]


@pytest.mark.usefixtures("own_logging")
def test_what_json_has_no_word_for_becomes_text(capsys):
    console.configure_logging("json")
    logging.getLogger("swarm.test").info("said", extra={"path": Path("/somewhere"), "keys": {(1, 2): "a", 3: (4,)}})
    [line] = objects(capsys)
    assert (line["path"], line["keys"]) == ("/somewhere", {"3": [4]})


@pytest.mark.usefixtures("own_logging")
def test_json_takes_what_others_warn_of(capsys, recwarn, monkeypatch):
    console.configure_logging("json")
    monkeypatch.setattr(logging, "_levelToName", {**logging._levelToName, logging.WARNING: "WARN"})  # as hivemind does
    logging.getLogger("somebody.else").warning("careful")
    logging.getLogger("somebody.else").info("not worth a line")
    warnings.warn("old", UserWarning, stacklevel=1)
    first, second = objects(capsys)
    assert (first["logger"], first["level"], first["message"]) == ("somebody.else", "WARNING", "careful")
    assert (second["logger"], second["level"]) == ("py.warnings", "WARNING")
    assert "UserWarning: old" in second["message"]


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_secrets_are_not_logged(capsys, log_format):
    text = (
        "the key sk-swarm-AbC_123-xyz, the line swarm-worker:AbC_123-xyz, hf_abcdefghIJKL, and "
        'header "Authorization: Bearer top.secret-token" or Authorization: Bearer top.secret-token'
    )
    console.configure_logging(log_format)
    logging.getLogger("swarm.test").warning("%s", text, extra={"also": text})
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("swarm.test").exception("it failed")
    said = capsys.readouterr().out
    assert said.count("[secret]") == 5 * (3 if log_format == "json" else 2)  # plain lines have no extra fields
    for secret in ("AbC_123", "abcdefgh", "top.secret"):
        assert secret not in said
    if log_format == "json":
        assert len([json.loads(line) for line in said.splitlines()]) == 2


@click.command()
@console.log_format_option
@console.errors_to_exit_codes
def failing(log_format: str) -> None:
    console.configure_logging(log_format)
    raise InvalidOption("nothing fits")


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(
    ("arguments", "environment"), [(["--log-format", "json"], {}), ([], {console.LOG_FORMAT_VARIABLE: "json"})]
)
def test_what_ends_a_command_is_a_line_of_its_log(arguments, environment):
    result = CliRunner().invoke(failing, arguments, env=environment)
    assert (result.exit_code, result.stderr) == (2, "")
    line = json.loads(result.stdout)
    assert (line["level"], line["message"], line["error"]) == ("ERROR", "nothing fits", "InvalidOption")


@pytest.mark.usefixtures("own_logging")
def test_what_ends_a_command_is_told_to_people_otherwise():
    result = CliRunner().invoke(failing, [])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "Error: nothing fits\n")


def test_a_format_that_is_none():
    result = CliRunner().invoke(failing, ["--log-format", "xml"])
    assert result.exit_code == 2
    assert "'xml' is not one of 'plain', 'json'" in result.stderr


@click.command(cls=console.MultiAddressCommand)
@console.network_options(31337)
def command(relay: bool | int, **others: object) -> None:
    click.echo(repr(relay))


def test_whether_to_relay_and_for_how_many():
    for arguments, expected in [
        ([], "True"),
        (["--relay", "on"], "True"),
        (["--relay", "off"], "False"),
        (["--relay", "0"], "0"),
        (["--relay", "1"], "1"),
        (["--relay", str(MAX_RELAYED_PEERS)], str(MAX_RELAYED_PEERS)),
    ]:
        result = CliRunner().invoke(command, arguments)
        assert (result.exit_code, result.output.strip()) == (0, expected)


def test_what_is_no_number_of_peers_to_relay_for():
    for value in ["", "yes", "ON", "-1", "1.5", "²", str(MAX_RELAYED_PEERS + 1), "9" * 5000]:
        result = CliRunner().invoke(command, ["--relay", value])
        assert result.exit_code == 2
        assert "neither on nor off nor a number up to" in result.output
