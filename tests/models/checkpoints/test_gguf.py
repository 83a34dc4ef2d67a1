"""GGUF files are read as their format is defined, alone and beside a config.json, and refused by name."""

from __future__ import annotations

import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CheckpointError, SwarmError, UnsupportedModel, UsageError
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.known_digests import known_digests
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.models.tokenizers.tokenizer import load_tokenizer
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from tests import zoo
from tests.models.checkpoints import gguf_layouts
from tests.models.checkpoints.gguf_layouts import Tensors
from tests.models.checkpoints.test_mutations import FLIPS, flipped, load, use
from tests.models.checkpoints.test_packed_weights import DTYPES, assert_equal, loaded
from tests.models.test_wrappers import assert_same, logits_of, logits_of_whole

torch.set_num_threads(1)


@pytest.mark.parametrize("family", [one for one in gguf_layouts.FAMILIES if one not in gguf_layouts.BY_TRANSFORMERS])
def test_logits_are_those_of_the_model_that_was_written(family, tmp_path):
    path = tmp_path / "model.gguf"
    model = gguf_layouts.make(family, path)
    expected = logits_of_whole(model)
    assert_same(logits_of(path), expected)
    model.config.save_pretrained(tmp_path)
    assert_same(logits_of(tmp_path), expected)


@pytest.mark.parametrize("family", gguf_layouts.BY_TRANSFORMERS)
def test_logits_are_those_of_transformers(family, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_layouts.make(family, path)
    assert_same(logits_of(path), logits_of_whole(gguf_layouts.transformers_load(path)))


@DTYPES
@pytest.mark.parametrize("kind", gguf_layouts.TYPES)
def test_a_type_is_read_as_it_is_defined(kind, dtype, tmp_path):
    model = gguf_layouts.make("llama", tmp_path / "model.gguf", kind)
    assert_equal(loaded(tmp_path / "model.gguf", dtype), model.to(dtype).state_dict())


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("Q8_0", torch.bfloat16)])
def test_the_dtype_to_compute_in(kind, dtype, tmp_path):
    gguf_layouts.make("llama", tmp_path / "model.gguf", kind)
    assert resolve_dtype("auto", open_checkpoint(tmp_path).config) == dtype


LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 8.0},
    **{"long_factor": [4.0, 8.0, 2.0, 3.0], "short_factor": [1.0, 1.5, 1.25, 2.0], "attention_factor": 1.25},
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "truncate": True}


@pytest.mark.parametrize(("family", "rope"), [("llama", LLAMA3), ("phi3", LONG), ("qwen2", YARN), ("qwen3", LINEAR)])
def test_scaled_rotary_positions(family, rope, tmp_path):
    path = tmp_path / "model.gguf"
    original = {name: rope[name] for name in ("original_max_position_embeddings",) if name in rope}
    model = gguf_layouts.make(family, path, config={"rope_parameters": rope, **original})
    assert open_checkpoint(path).config.rope_parameters == rope
    assert_same(logits_of(path), logits_of_whole(model))


def test_a_file_a_folder_and_a_split_file_are_one_model(tmp_path):
    for place, splits in (("one", 1), ("three", 3)):
        gguf_layouts.make("qwen3", tmp_path / place / "tiny-Q8_0.gguf", splits=splits)
    (tmp_path / "one" / "mmproj-model.gguf").write_bytes(b"of images")
    file, split = tmp_path / "one" / "tiny-Q8_0.gguf", tmp_path / "three" / "tiny-Q8_0-00002-of-00003.gguf"
    server, client, third = open_checkpoint(tmp_path / "one"), open_checkpoint(file), open_checkpoint(split)
    assert (server.name, client.name, third.name) == ("one", "tiny-Q8_0", "tiny-Q8_0")
    assert server.revision == client.revision != third.revision
    assert known_digests(server).by_block == known_digests(client).by_block == known_digests(third).by_block
    assert len(set(known_digests(client).by_block.values())) == zoo.BLOCKS
    assert_equal(loaded(file, torch.float32), loaded(split, torch.float32))
    with pytest.raises(CheckpointError, match="in which peers do not give each other weights"):
        CheckpointParts.of(client)

    split.with_name("tiny-Q8_0-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"tiny-Q8_0-00003-of-00003.gguf is missing beside"):
        open_checkpoint(split)
    shutil.copy(file, tmp_path / "one" / "tiny-Q4_0.gguf")
    with pytest.raises(CheckpointError, match=r"several models in GGUF: tiny-Q4_0\.gguf, tiny-Q8_0\.gguf"):
        open_checkpoint(tmp_path / "one")


def test_the_tokenizer_comes_from_the_file(tmp_path):
    edited(tmp_path, "qwen2", **{"tokenizer.ggml.eos_token_id": 127, "tokenizer.ggml.eot_token_id": 126})
    assert open_checkpoint(tmp_path).config.eos_token_id == [127, 126]
    for source in (tmp_path, tmp_path / "model.gguf"):
        tokenizer = load_tokenizer(source)
        tokens = tokenizer("It is 12 o'clock.\n")["input_ids"]
        assert tokens == [ord(one) for one in "It is 12 o'clock.\n"]
        assert tokenizer.decode(tokens) == "It is 12 o'clock.\n"
        assert tokenizer.eos_token_id == 127
        assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])["input_ids"] == [72, 105]
    zoo.save_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).unk_token == "?"


def edited(tmp_path: Path, family: str = "llama", tensors: Tensors | None = None, **said: Any) -> Path:
    """A file of which something is changed."""
    gguf_layouts.make(
        family, tmp_path / "model.gguf", edit=lambda entries, found: (entries | said, found | (tensors or {}))
    )
    return tmp_path / "model.gguf"


VECTOR = (0, (64,), bytes(256))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"general.architecture": "clip"},
            "the architecture 'clip', which is not read from GGUF; these are: llama, qwen2",
        ),
        ({"llama.attention.scale": 0.25}, r"llama.attention.scale is 0.25, which is not read from GGUF"),
        ({"llama.expert_count": 8}, "a mixture of experts of the architecture llama"),
        ({"llama.rope.scaling.type": "other"}, "rotary positions are scaled by 'other'"),
        ({"llama.block_count": 1 << 31}, "2147483648 blocks, of which 2048 are allowed"),
        ({"llama.attention.head_count": []}, "what model.gguf says of its model cannot be used"),
        ({"tensors": {"blk.0.attn_q.scale": VECTOR}}, "a tensor blk.0.attn_q.scale, which a llama model as its config"),
        (
            {"tensors": {"blk.0.attn_q.weight": (36, (64, 64), bytes(9999))}},
            "packed in type 36 of GGUF, which is not read",
        ),
        ({"tensors": {"blk.0.attn_q.weight": (8, (64, 1 << 40), b"")}}, "model.gguf is shorter than its header says"),
        ({"tensors": {"blk.0.attn_q.weight": (8, (64, 33), bytes(9999))}}, r"the shape \[64, 33\], of no whole blocks"),
        (
            {"tensors": {"blk.0.attn_q.weight": (0, (2, 64), bytes(512))}},
            "blk.0.attn_q.weight, whose shapes are others",
        ),
        ({"tensors": {"rope_freqs.weight": (0, (8,), struct.pack("8f", *range(1, 9)))}}, "scaled in an unknown way"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes, words, tmp_path):
    with pytest.raises(SwarmError, match=words):
        load(open_checkpoint(edited(tmp_path, **changes)))


def test_a_config_of_another_family_is_refused(tmp_path):
    gguf_layouts.make("llama", tmp_path / "model.gguf")
    zoo.config_of("qwen2", **gguf_layouts.SIZES).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks 3 tensors that the model needs, such as .*k_proj\.bias"):
        load(open_checkpoint(tmp_path))


def test_a_vocabulary_whose_split_is_unknown_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="it splits texts as 'new' does, which is not read from GGUF"):
        load_tokenizer(edited(tmp_path, **{"tokenizer.ggml.pre": "new"}))


COUNTS = st.sampled_from([0, 1, 7, 255, 1 << 16, 1 << 31, 1 << 40, 1 << 60, (1 << 64) - 1])


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    gguf_layouts.make("llama", path, config={"num_hidden_layers": 2})
    return path.read_bytes()


def used(folder: Path, data: bytes, is_loaded: bool) -> None:
    """What a server, a client and a gateway read of a file: used, or refused with an error of ours."""
    (folder / "model.gguf").write_bytes(data)
    with suppress(UsageError):
        load_tokenizer(folder)
    with suppress(UsageError, UnsupportedModel):
        use(folder)
        if is_loaded:
            load(open_checkpoint(folder))


@settings(max_examples=80)
@given(FLIPS, st.integers(0, 10**6), st.booleans(), st.booleans())
def test_a_file_with_changed_and_missing_bytes(tmp_path_factory, original, flips, cut, is_cut, is_loaded):
    header = original.index(b"output_norm.weight") + 2000
    changed = flipped(original, flips, within=header)
    used(tmp_path_factory.mktemp("changed"), changed[: cut % len(changed)] if is_cut else changed, is_loaded)


@settings(max_examples=80)
@given(st.integers(0, 10**6), COUNTS, st.sampled_from(["<I", "<Q"]), st.booleans())
def test_a_file_with_an_absurd_number(tmp_path_factory, original, place, count, form, is_loaded):
    changed = bytearray(original)
    struct.pack_into(form, changed, place % 12000, count & (0xFFFFFFFF if form == "<I" else (1 << 64) - 1))
    used(tmp_path_factory.mktemp("changed"), bytes(changed), is_loaded)


@settings(max_examples=60)
@given(st.integers(0, 40), COUNTS | st.sampled_from([True, 0.5, float("nan"), "", "x", [], [1, 2], ["x"], -1.0]))
def test_a_file_with_another_value(tmp_path_factory, number, value):
    folder = tmp_path_factory.mktemp("changed")

    def change(entries: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
        key = list(entries)[number % len(entries)]
        return {**entries, key: value & 0xFFFFFFFF if type(value) is int else value}, tensors

    gguf_layouts.make("llama", folder / "model.gguf", "F16", config={"num_hidden_layers": 2}, edit=change)
    used(folder, (folder / "model.gguf").read_bytes(), True)
