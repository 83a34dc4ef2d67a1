"""What travels by default is what the page says was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from swarm.data_structures import WireFormat
from swarm.models.wire_defaults import (
    BLOCKWISE8_FAMILIES,
    CALIBRATION_HOPS,
    OUTLIER_FACTOR,
    default_wire_format,
)

pytest.importorskip("matplotlib")  # scripts of this checkout draw with it; what computes does without

from scripts import calibrate_wire

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text("utf-8")


def rows(section: str) -> list[list[str]]:
    """The cells of the table between two markers of the page, without its head."""
    _, table, _ = PAGE.split(calibrate_wire.MARK.format(section))
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


DEFAULTS = {cells[0]: cells[1:] for cells in rows("defaults")}


def test_the_page_and_the_code_agree() -> None:
    assert {family for family, cells in DEFAULTS.items() if cells[0] == "blockwise8"} == BLOCKWISE8_FAMILIES
    assert {cells[0] for cells in DEFAULTS.values()} <= {"blockwise8", "16 bits"}


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
