"""`swarm flash`: what its commands print, refuse and remove."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from swarm.cli.__main__ import main
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER, open_checkpoint
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.files.block_files import PackedModel, flash_root
from swarm.models.flash.files.manifest import FORMAT_VERSION
from swarm.models.flash.planned_blocks import plan_block
from tests import zoo
from tests.models.flash.files.preparations import open_packed

OPTIONS = {
    "prepare": {"model", "--revision", "--blocks", "--dtype", "--flash-exact", "--cache-dir", "--help"},
    "show": {"--cache-dir", "--help"},
    "clean": {"model", "--yes", "--cache-dir", "--help"},
}


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    return zoo.make_checkpoint("mixtral", tmp_path_factory.mktemp("zoo") / "mixtral")


@pytest.fixture(autouse=True)
def _logging_as_before(monkeypatch):
    """`prepare` logs to the terminal, as every command that takes long; tests in this process go on without."""
    logger = logging.getLogger("swarm")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))


def run(cache: Path, *arguments: object, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, ["flash", *map(str, arguments), "--cache-dir", str(cache)], input=answer)


def lines(result: Result) -> list[list[str]]:
    """The cells of a table."""
    assert result.exit_code == 0, result.output
    return [line.split("  ") for line in result.stdout.splitlines()]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_frozen(name):
    from swarm.cli import flash

    command = flash.main.commands[name]
    context = command.make_context(name, [])
    assert {parameter.opts[-1] for parameter in command.get_params(context)} == OPTIONS[name]


def test_prepare_show_and_clean(cache, mixtral):
    result = run(cache, "prepare", mixtral, "--blocks", "1:3")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"Prepared blocks 1:3: mixtral, in {cache / 'swarm-flash'}"
    assert "Preparing blocks 1:3 of mixtral for flash: " in result.stdout
    again = run(cache, "prepare", mixtral, "--blocks", "1:3")
    assert again.stdout == f"Blocks 1:3 were prepared already: mixtral, in {cache / 'swarm-flash'}\n"

    assert run(cache, "prepare", mixtral, "--blocks", "4:5", "--dtype", "bfloat16").exit_code == 0
    shown = run(cache, "show")
    headings, *rows = [[cell.strip() for cell in line if cell.strip()] for line in lines(shown)]
    assert headings == ["MODEL", "REVISION", "DTYPE", "BLOCKS", "KIND", "SIZE", "LAST USED"]
    revision = open_checkpoint(mixtral).revision
    assert [row[:5] for row in rows] == [
        ["mixtral", revision, "bfloat16", "4:5", "experts"],
        ["mixtral", revision, "float32", "1:3", "experts"],
    ]
    assert all(row[5].endswith("KB") and row[6] == "just now" for row in rows)

    assert run(cache, "clean", "mixtral", "--yes").exit_code == 0
    assert [path.name for path in (cache / "swarm-flash").iterdir()] == [".locks"]
    assert "holds no packed weights: write some with" in run(cache, "show").stderr


def test_all_blocks_are_prepared_by_default(cache, mixtral):
    assert "Prepared blocks 0:6: mixtral" in run(cache, "prepare", mixtral).stdout


@pytest.mark.parametrize(("options", "kind"), [((), "neurons"), (("--flash-exact",), "block")])
def test_neurons_are_selected_unless_servers_are_exact(cache, tmp_path, options, kind):
    opt = zoo.make_checkpoint("opt", tmp_path / "opt")
    zoo.save_tokenizer(opt)
    assert "Prepared blocks 0:1" in run(cache, "prepare", opt, "--blocks", "0:1", *options).stdout
    assert kind in run(cache, "show").stdout.split()
    assert len(list(cache.rglob("*.predictor.safetensors"))) == (kind == "neurons")


def test_both_kinds_lie_side_by_side(cache, tmp_path):
    """Changing from one to the other and back prepares nothing again."""
    opt = zoo.make_checkpoint("opt", tmp_path / "opt")
    zoo.save_tokenizer(opt)
    for blocks, options in (("0:2", ()), ("1:2", ("--flash-exact",))):
        assert f"Prepared blocks {blocks}" in run(cache, "prepare", opt, "--blocks", blocks, *options).stdout
    for options in ((), ("--flash-exact",)):
        again = run(cache, "prepare", opt, "--blocks", "1:2", *options)
        assert "Blocks 1:2 were prepared already" in again.stdout
    _, *rows = [[cell.strip() for cell in line if cell.strip()] for line in lines(run(cache, "show"))]
    assert [row[3:5] for row in rows] == [["1:2", "block"], ["0:2", "neurons"]]
    assert run(cache, "clean", "opt", "--yes").exit_code == 0
    assert [path.name for path in (cache / "swarm-flash").iterdir()] == [".locks"]


@pytest.mark.parametrize("name", ["block-0000.json", "block-0001.predictor.json", "block-0002.columns.records"])
def test_files_that_another_version_of_the_program_wrote_are_shown_and_removed(cache, mixtral, name):
    run(cache, "prepare", mixtral, "--blocks", "0:1")
    folder = PackedModel.of(open_checkpoint(mixtral), torch.float32, flash_root(cache)).folder
    (manifest,) = folder.glob("*.json")
    (folder / name).write_bytes(manifest.read_bytes())
    rows = sorted(row[3:5] for row in lines(run(cache, "show"))[1:])
    assert [[cell.strip() for cell in row] for row in rows][1][0] == "none finished"
    assert run(cache, "clean", "mixtral", "--yes").exit_code == 0
    assert not folder.exists()


def test_a_cache_behind_a_symbolic_link(cache, mixtral, tmp_path):
    """The link and the folder behind it stay."""
    (tmp_path / "drive").mkdir()
    cache.symlink_to(tmp_path / "drive")
    assert "Prepared blocks 0:1" in run(cache, "prepare", mixtral, "--blocks", "0:1").stdout
    assert "were prepared already" in run(tmp_path / "drive", "prepare", mixtral, "--blocks", "0:1").stdout
    assert "mixtral" in run(cache, "show").stdout
    assert run(cache, "clean", "--yes").exit_code == 0
    assert cache.is_symlink()
    assert [path.name for path in (tmp_path / "drive" / "swarm-flash").iterdir()] == [".locks"]


def test_blocks_of_a_newer_version_of_the_program_are_prepared_again(cache, mixtral):
    run(cache, "prepare", mixtral, "--blocks", "0:1")
    model = PackedModel.of(open_checkpoint(mixtral), torch.float32, flash_root(cache))
    manifest = model.files(0, RecordKind.EXPERTS).manifest
    content = json.dumps({"format": FORMAT_VERSION + 1, "and": "what only that version knows"})
    digest = hashlib.sha256(content.encode()).hexdigest()
    manifest.write_text(f'{{"sha256":"{digest}","content":{content}}}')
    assert "none finished" in run(cache, "show").stdout
    again = run(cache, "prepare", mixtral, "--blocks", "0:1")
    assert f"it has format {FORMAT_VERSION + 1}, this program writes and reads format {FORMAT_VERSION}" in again.stdout
    assert "Prepared blocks 0:1" in again.stdout
    assert "none finished" not in run(cache, "show").stdout


def test_nothing_is_removed_without_a_yes(cache, mixtral):
    run(cache, "prepare", mixtral, "--blocks", "0:1")
    refused = run(cache, "clean", answer="n\n")
    assert refused.exit_code == 1
    assert "of packed weights (mixtral)? [y/N]" in refused.stderr
    assert "mixtral" in run(cache, "show").stdout
    assert run(cache, "clean", answer="").exit_code == 1
    assert "mixtral" in run(cache, "show").stdout
    assert run(cache, "clean", answer="y\n").exit_code == 0
    assert run(cache, "show").stdout == ""


def test_weights_that_a_server_uses_are_not_removed(cache, mixtral):
    run(cache, "prepare", mixtral, "--blocks", "0:1")
    prepared = open_packed(open_checkpoint(mixtral), flash_root(cache), 0, plan_of=plan_block)
    refused = run(cache, "clean", "--yes")
    assert refused.exit_code == 2
    assert refused.stderr == (
        "Error: the packed weights of mixtral (float32) are in use: stop the servers that use them, or let their "
        "preparation end\n"
    )
    assert prepared.resident_tensors()
    prepared.close()
    assert run(cache, "clean", "--yes").exit_code == 0


def test_files_of_others_are_not_removed(cache, mixtral):
    run(cache, "prepare", mixtral, "--blocks", "0:1")
    folder = PackedModel.of(open_checkpoint(mixtral), torch.float32, flash_root(cache)).folder
    (folder / "notes.txt").write_text("mine")
    assert run(cache, "clean", "mixtral", "--yes").exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_what_cannot_be_read_is_shown_and_can_be_removed(cache, mixtral):
    run(cache, "prepare", mixtral, "--blocks", "0:2")
    model = PackedModel.of(open_checkpoint(mixtral), torch.float32, flash_root(cache))
    for block in range(2):
        model.files(block, RecordKind.EXPERTS).manifest.write_bytes(b"{}")
    assert lines(run(cache, "show"))[1][0] == model.folder_name
    assert "none finished" in run(cache, "show").stdout
    assert run(cache, "clean", model.folder_name, "--yes").exit_code == 0
    assert run(cache, "show").stdout == ""


@pytest.mark.parametrize(
    ("age", "text"),
    [(0, "just now"), (119, "just now"), (150, "2 minutes ago"), (7300, "2 hours ago"), (86400 * 5, "5 days ago")],
)
def test_the_last_use_is_shown_in_words(cache, mixtral, age, text):
    from swarm.cli.flash import _age

    assert _age(age) == text


def test_a_use_counts_from_when_the_blocks_were_opened(cache, mixtral):
    run(cache, "prepare", mixtral, "--blocks", "0:1")
    model = PackedModel.of(open_checkpoint(mixtral), torch.float32, flash_root(cache))
    lock = flash_root(cache) / ".locks" / f"{model.folder_name}.used"
    os.utime(lock, (time.time() - 86400 * 3,) * 2)
    assert "3 days ago" in run(cache, "show").stdout
    open_packed(open_checkpoint(mixtral), flash_root(cache), 0, plan_of=plan_block).close()
    assert "just now" in run(cache, "show").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("prepare", "no/such model"), "neither a local folder nor a model's name on the hub"),
        (("prepare", DEMO_FOLDER, "--blocks", "3"), "--blocks '3': use START:END, such as 0:8"),
        (("prepare", DEMO_FOLDER, "--blocks", "4:99"), "blocks 4:99 do not lie inside"),
        (("prepare", DEMO_FOLDER, "--blocks", "4:4"), "4:4 is not a range of blocks"),
        (("prepare", DEMO_FOLDER, "--dtype", "int8"), "'int8' is not one of"),
        (("clean", "org/other", "--yes"), "holds no packed weights of org/other; `swarm flash show` lists"),
    ],
)
def test_what_cannot_be_done_exits_with_2_and_one_line(cache, arguments, says):
    result = run(cache, *arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_full_drive_is_refused_in_one_line(cache, mixtral, monkeypatch):
    from swarm.models.flash.files import preparation

    monkeypatch.setattr(preparation, "SPARE_BYTES", 1 << 60)
    result = run(cache, "prepare", mixtral)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "need" in result.stderr


def test_an_empty_cache(cache):
    assert run(cache, "show").exit_code == 0
    assert run(cache, "clean", "--yes").exit_code == 0
