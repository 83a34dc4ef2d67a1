"""PEFT's files as they are read here: the right parts, and whatever else somebody may put into a folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarm.data_structures import Span
from swarm.errors import AdapterError, AdapterMismatch
from swarm.models.adapters import adapter_files
from swarm.models.adapters.adapter_files import read_block_weights
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tests.zoo import BLOCKS, make_checkpoint

RANK, ALPHA = 4, 12
PLACE = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def made(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA as PEFT writes it."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint.source, dtype=torch.float32)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, use_rslora=True, init_lora_weights=False, rank_pattern={"v_proj": 2}
    )
    folder = tmp_path_factory.mktemp("adapters")
    peft.get_peft_model(base, config).save_pretrained(folder)
    return folder


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture
def changed(made: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """The same files with something else in them."""

    def write(change: Change) -> Path:
        config, tensors = (
            json.loads((made / "adapter_config.json").read_text()),
            load_file(made / adapter_files.WEIGHTS_FILE),
        )
        change(config, tensors)
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / adapter_files.WEIGHTS_FILE
        )
        return tmp_path

    return write


def test_the_parts_of_a_span_are_the_files_factors_scaled(checkpoint: Checkpoint, made: Path) -> None:
    tensors = load_file(made / adapter_files.WEIGHTS_FILE)
    parts = read_block_weights(made, checkpoint, Span(2, 5))
    assert sorted(parts) == [2, 3, 4]
    for block, part in parts.items():
        assert part.prompt is None
        assert [one.module for one in part.factors] == ["self_attn.q_proj", "self_attn.v_proj"]
        for one, rank in zip(part.factors, (RANK, 2), strict=True):
            name = one.module.rpartition(".")[2]
            assert torch.equal(one.down, tensors[PLACE.format(block, name, "A")])
            up = tensors[PLACE.format(block, name, "B")]
            torch.testing.assert_close(one.up, up * ALPHA / math.sqrt(rank))
            assert one.up.dtype is torch.float32


def set_config(**entries: Any) -> Change:
    return lambda config, tensors: config.update(entries)


def set_tensor(name: str, tensor: torch.Tensor) -> Change:
    return lambda config, tensors: tensors.update({name: tensor})


def drop(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


A0, B0 = PLACE.format(0, "q_proj", "A"), PLACE.format(0, "q_proj", "B")


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (set_config(peft_type="IA3"), AdapterError, "IA3"),
        (set_config(use_dora=True), AdapterError, "use_dora"),
        (set_config(bias="lora_only"), AdapterError, "biases"),
        (set_config(init_lora_weights="pissa"), AdapterError, "pissa"),
        (set_config(of_next_year={"x": 1}), AdapterError, "of_next_year"),
        (set_config(r=0), AdapterError, "r is 0"),
        (set_config(lora_alpha=float("inf")), AdapterError, "lora_alpha is inf"),
        (set_config(rank_pattern={"(a+)+$": 4}), AdapterError, "regular expressions"),
        (set_config(r=5), AdapterMismatch, r"lora_A.weight is \[4, 32\] instead of \[5, 32\]"),
        (set_config(peft_type="PROMPT_TUNING"), AdapterError, "num_virtual_tokens is 0"),
        (set_tensor(A0, torch.zeros(RANK, 64)), AdapterMismatch, r"\[4, 64\] instead of \[4, 32\]"),
        (set_tensor(B0, torch.full((32, RANK), float("nan"))), AdapterError, "holds NaN"),
        (set_tensor(PLACE.format(6, "q_proj", "A"), torch.zeros(RANK, 32)), AdapterMismatch, "the model has 6"),
        (set_tensor(PLACE.format(0, "z_proj", "A"), torch.zeros(RANK, 32)), AdapterError, "z_proj"),
        (
            set_tensor("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 32)),
            AdapterError,
            "outside the blocks",
        ),
        (drop(B0), AdapterError, "only one"),
        (
            set_config(revision="a" * 40, base_model_name_or_path="some/base"),
            AdapterMismatch,
            "some/base of revision aaa",
        ),
        (
            set_config(revision="folder-0123456789ab"),
            AdapterMismatch,
            "revision folder-0123456789ab, and this is llama",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Change, kind: type[Exception], said: str, checkpoint: Checkpoint, changed: Any
) -> None:
    with pytest.raises(kind, match=said) as caught:
        read_block_weights(changed(change), checkpoint, Span(0, BLOCKS))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_another_revision_can_be_forced(checkpoint: Checkpoint, changed: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(set_config(revision="a" * 40))
    assert len(read_block_weights(folder, checkpoint, Span(0, BLOCKS), force=True)) == BLOCKS
    assert "used anyway" in caplog.text


def test_a_layer_of_a_tower_is_not_taken_for_a_block(checkpoint: Checkpoint, made: Path, tmp_path: Path) -> None:
    """Adapters of models that see images name both alike."""
    tensors = {
        name.replace("model.layers", "model.vision_tower.layers"): one
        for name, one in load_file(made / adapter_files.WEIGHTS_FILE).items()
    }
    shutil.copytree(made, tmp_path / "changed")
    save_file(tensors, tmp_path / "changed" / adapter_files.WEIGHTS_FILE)
    with pytest.raises(AdapterError, match="outside the blocks"):
        read_block_weights(tmp_path / "changed", checkpoint, Span(0, BLOCKS))


@pytest.mark.parametrize("name", adapter_files.PICKLED_WEIGHTS_FILES)
def test_pickled_weights_are_refused_by_name(name: str, checkpoint: Checkpoint, made: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes((made / "adapter_config.json").read_bytes())
    torch.save(load_file(made / adapter_files.WEIGHTS_FILE), tmp_path / name)
    with pytest.raises(AdapterError, match=f"{name}, a pickled file"):
        read_block_weights(tmp_path, checkpoint, Span(0, BLOCKS))


def test_files_that_are_not_there_or_not_what_they_are_called(
    checkpoint: Checkpoint, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AdapterError, match=r"has no adapter_config.json"):
        read_block_weights(tmp_path, checkpoint, Span(0, 1))
    (tmp_path / "adapter_config.json").write_bytes((made / "adapter_config.json").read_bytes())
    with pytest.raises(AdapterError, match=r"has no adapter_model.safetensors"):
        read_block_weights(tmp_path, checkpoint, Span(0, 1))
    (tmp_path / adapter_files.WEIGHTS_FILE).write_bytes(b"no safetensors")
    with pytest.raises(AdapterError, match="not a readable safetensors file"):
        read_block_weights(tmp_path, checkpoint, Span(0, 1))
    monkeypatch.setattr(adapter_files, "MAX_WEIGHTS_BYTES", 10)
    with pytest.raises(AdapterError, match="at most 10 are allowed"):
        read_block_weights(tmp_path, checkpoint, Span(0, 1))
    with pytest.raises(AdapterError, match="not a local folder, and the hub cannot be reached"):
        read_block_weights("nobody/has-this", checkpoint, Span(0, 1))
    with pytest.raises(AdapterError, match="neither a local folder"):
        read_block_weights("not/there/at/all", checkpoint, Span(0, 1))


class Hub:
    """A repository that holds the files of a folder; remembers what was downloaded."""

    def __init__(self, folder: Path, sizes: dict[str, int] | None = None) -> None:
        self.folder, self.sizes, self.downloaded = folder, sizes or {}, []

    def __call__(self, repository: str, file: str, *, dry_run: bool = False, **options: Any) -> Any:
        path = self.folder / file
        if not path.is_file():
            raise EntryNotFoundError(file)
        if dry_run:
            size = self.sizes.get(file, path.stat().st_size)
            return type("Planned", (), {"file_size": size, "commit_hash": "c" * 40})
        self.downloaded.append((repository, file, options.get("revision")))
        return str(path)


def test_a_repository_is_read_as_a_folder_is(
    checkpoint: Checkpoint, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(made)
    monkeypatch.setattr(adapter_files, "hf_hub_download", hub)
    assert len(read_block_weights("some/adapter", checkpoint, Span(0, BLOCKS), revision="v2")) == BLOCKS
    assert hub.downloaded == [
        ("some/adapter", "adapter_config.json", "v2"),
        ("some/adapter", "adapter_model.safetensors", "v2"),
    ]


def test_what_is_too_large_or_pickled_is_not_even_downloaded(
    checkpoint: Checkpoint, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(made, {adapter_files.WEIGHTS_FILE: 1 << 40})
    monkeypatch.setattr(adapter_files, "hf_hub_download", hub)
    with pytest.raises(AdapterError, match="1099511627776 bytes long"):
        read_block_weights("some/adapter", checkpoint, Span(0, 1))
    (tmp_path / "adapter_config.json").write_bytes((made / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    pickled = Hub(tmp_path)
    monkeypatch.setattr(adapter_files, "hf_hub_download", pickled)
    with pytest.raises(AdapterError, match=r"adapter_model.bin, a pickled file"):
        read_block_weights("some/adapter", checkpoint, Span(0, 1))
    assert {file for _, file, _ in hub.downloaded + pickled.downloaded} == {"adapter_config.json"}
