"""What travels by default is what the page says was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from swarm.data_structures import WireFormat
from swarm.models.wire_defaults import (
    BLOCKWISE8_FAMILIES,
    CALIBRATION_HOPS,
    MAX_PERPLEXITY_CHANGE_PERCENT,
    OUTLIER_FACTOR,
    default_wire_format,
)

pytest.importorskip("matplotlib")  # scripts of this checkout draw with it; what computes does without

from scripts import calibrate_wire
from scripts.wire_damage import Damage

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text("utf-8")
FIGURE = re.compile(r"([+-]\d+\.\d+) ± (\d+\.\d+)")


def rows(section: str) -> list[list[str]]:
    """The cells of the table between two markers of the page, without its head."""
    _, table, _ = PAGE.split(calibrate_wire.MARK.format(section))
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


DEFAULTS = {cells[0]: cells[1:] for cells in rows("defaults")}


def is_small(cell: str) -> bool:
    match = FIGURE.fullmatch(cell)
    assert match, cell
    return abs(float(match[1])) + float(match[2]) < MAX_PERPLEXITY_CHANGE_PERCENT


def test_the_page_and_the_code_agree() -> None:
    assert {family for family, cells in DEFAULTS.items() if cells[0] == "blockwise8"} == BLOCKWISE8_FAMILIES
    assert {cells[0] for cells in DEFAULTS.values()} <= {"blockwise8", "16 bits"}


@pytest.mark.parametrize("family", DEFAULTS)
def test_the_default_follows_from_the_figures(family: str) -> None:
    default, plain, _, stressed, *_, perplexity = DEFAULTS[family]
    learnt = float(perplexity) <= calibrate_wire.LEARNT
    assert (default == "blockwise8") == (learnt and is_small(plain) and is_small(stressed))


def test_the_page_has_each_format_of_each_family() -> None:
    found = {(cells[0], cells[1]) for cells in rows("families")}
    rounded = [wire.value for wire in WireFormat if wire is not WireFormat.NONE]
    assert found == {(family, wire) for family in DEFAULTS for wire in rounded}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "float16", None])
@pytest.mark.parametrize("family", ["llama", "ctrl"])
def test_the_format_of_a_checkpoint(family: str, dtype: torch.dtype | str | None) -> None:
    config = AutoConfig.for_model(family, dtype=dtype)
    halves = WireFormat.FLOAT16 if dtype in (torch.float16, "float16") else WireFormat.BFLOAT16
    assert default_wire_format(config) is (WireFormat.BLOCKWISE8 if family == "llama" else halves)
    assert default_wire_format(config, trains=True) is halves


def figures(plain: float, stressed: float, uncertainty: float, perplexity: float = 200.0) -> calibrate_wire.Row:
    common = {"wire": "blockwise8", "hops": CALIBRATION_HOPS, "uncertainty": uncertainty}
    return {
        "perplexity": perplexity,
        "damage": [
            {**common, "outliers": 1.0, "perplexity": plain},
            {**common, "outliers": OUTLIER_FACTOR, "perplexity": stressed},
        ],
    }


@pytest.mark.parametrize(
    ("plain", "stressed", "uncertainty", "harmless"),
    [
        (0.1, 0.1, 0.1, True),
        (0.45, 0.1, 0.1, False),  # it might be more than that
        (0.1, 0.45, 0.1, False),
        (-0.6, 0.1, 0.0, False),  # a change is a change
        (0.1, 0.1, 0.4, False),
    ],
)
def test_the_rule(plain: float, stressed: float, uncertainty: float, harmless: bool) -> None:
    assert calibrate_wire.harmless(figures(plain, stressed, uncertainty)) == harmless
    assert not calibrate_wire.harmless(figures(plain, stressed, uncertainty, perplexity=580.0))


def test_damage_is_what_it_says() -> None:
    exact = torch.tensor([[[0.5, 0.25, 0.25]], [[0.5, 0.25, 0.25]]]).log()
    came = torch.tensor([[[0.25, 0.5, 0.25]], [[0.5, 0.25, 0.25]]]).log()
    damage = Damage()
    damage.add(exact, came, torch.zeros(2, 1, dtype=torch.long))
    # One of two windows halved the probability of its token: the mean loss grows by log(2) / 2.
    assert damage.perplexity == pytest.approx(100 * (2**0.5 - 1))
    assert damage.divergence == pytest.approx(0.25 * torch.tensor(2.0).log().item() / 2)
    assert damage.greedy_changed == 50
    assert damage.uncertainty == pytest.approx(100 * torch.tensor(2.0).log().item(), rel=1e-3)


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    mark = calibrate_wire.MARK.format("models")
    assert calibrate_wire.put(f"a\n{mark}\nold\n{mark}\nb", "models", "new") == f"a\n{mark}\n\nnew\n\n{mark}\nb"
