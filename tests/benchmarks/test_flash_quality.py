"""The benchmark of quality runs over a small model, and its bounds hold there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.flash.quality import __main__ as flash_quality
from benchmarks.flash.quality import methods, reads
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.loading.neuron_calibration import calibration_text


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An OPT with random weights and the demo model's tokenizer."""
    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64}
    config = AutoConfig.for_model(
        "opt", **options, word_embed_proj_dim=32, vocab_size=2048, max_position_embeddings=512
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "opt")
    for path in DEMO_FOLDER.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "opt")
    return tmp_path / "opt"


def run(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(flash_quality, "QUICK_WINDOWS", 4)
    monkeypatch.setattr(methods, "TRAINING_WINDOWS", 6)
    monkeypatch.setattr(methods, "CALIBRATION_WINDOWS", 2)
    text = folder / "text.txt"
    text.write_text(calibration_text())
    monkeypatch.setattr("sys.argv", ["flash_quality", str(model), "--text", str(text), *options, "--quick"])
    flash_quality.main()


@pytest.mark.slow
def test_every_method_is_measured(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, picture = (tmp_path / name for name in ("found.json", "picture.png"))
    options = ["--ranks", "4", "--recalls", "0.5", "0.9", "--json", str(found), "--picture", str(picture)]
    run(model, tmp_path, monkeypatch, *options)
    results = json.loads(found.read_text())["results"]["opt"]
    methods = {result["method"]: result for result in results}
    assert set(methods) == {"oracle", "gate", "svd 4", "inputs svd 4", "trained 4", "default"}
    assert methods["gate"]["ratio"] == pytest.approx(1, rel=1e-5)
    for layer in methods["gate"]["layers"]:
        assert layer["recall"] == 1
        assert layer["selected"] == pytest.approx(layer["active"])
    oracles = [result for result in results if result["method"] == "oracle"]
    assert [round(layer["energy"], 1) for one in oracles for layer in one["layers"]] == [0.5, 0.5, 0.9, 0.9]
    assert picture.stat().st_size > 1000


def test_what_each_rule_reads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, tmp_path, monkeypatch, "--reads")
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [(row[0].strip(), row[1].strip()) for row in lines] == [
        ("25%", "1"),
        ("25%", "4"),
        ("50%", "1"),
        ("50%", "4"),
    ]
    for row in lines:
        best, oldest, rarest = (float(cell.split("%")[0]) for cell in row[2:5])
        assert best <= min(oldest, rarest)


def test_sessions_take_turns() -> None:
    trace_RTN = np.arange(4 * 3).reshape(4, 3, 1)
    assert reads.in_turns(trace_RTN, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
