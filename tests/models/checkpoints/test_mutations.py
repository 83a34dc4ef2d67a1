"""A checkpoint's files that were changed at random: they are used, or refused with an error of ours."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swarm.data_structures import Span
from swarm.errors import CheckpointError, DigestFileError, UsageError
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, open_checkpoint
from swarm.models.checkpoints.known_digests import encode_digest_file, known_digests, read_digest_file
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.models.checkpoints.safetensors_header import parse_header
from swarm.models.exits.trained_exits import EXITS_FILE, BaseModel, ExitClassifier, ExitLens, TrainedExits
from swarm.models.loading.span_loading import load_span
from tests import zoo
from tests.models.checkpoints import packed_layouts

torch.set_num_threads(1)

NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**48, 2**63, 2**64, 10**30, 0.5, 1e300]))
DTYPES = [
    *("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64"),
    *("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F6_E2M3", "F6_E3M2", "F4", "Q4", "", "f32"),
]
JUNK: Any = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.sampled_from(["", "\0", "x", "../x", "\ud800", "model.safetensors", [], {}, [[]], {"": {}}, float("nan")]),
)
FLIPS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    zoo.make_checkpoint("llama", root / "single")
    zoo.make_checkpoint("llama", root / "sharded", max_shard_size="40KB")
    packed = {layout: packed_layouts.make(layout, root / layout)[0] for layout in ("fp8 blocks", "GPTQ desc_act")}
    return {"single": root / "single", "sharded": root / "sharded", **packed}


@contextmanager
def copied(tmp_path_factory: pytest.TempPathFactory, original: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(original, folder, copy_function=os.link)  # what is changed is written anew
    try:
        yield folder
    finally:
        shutil.rmtree(folder.parent)


def write(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def flipped(data: bytes, flips: list[tuple[int, int]], within: int | None = None) -> bytes:
    changed = bytearray(data)
    for place, value in flips:
        changed[place % (within or len(data))] = value
    return bytes(changed)


def use(folder: Path) -> None:
    """All that servers and clients read of a checkpoint, but for models themselves. Raises what they do."""
    checkpoint = open_checkpoint(folder)
    checkpoint.generation_config()
    resolve_dtype("auto", checkpoint.config)
    known_digests(checkpoint)
    for _ in checkpoint.read_tensors(checkpoint.is_client_tensor):
        pass


def load(checkpoint: Checkpoint) -> None:
    load_span(checkpoint, Span(0, 1), dtype=torch.float32, device=torch.device("cpu"))
    load_blockless_model(checkpoint, nn.Identity(), Mixin, dtype=torch.float32)


class Mixin:
    """In place of what clients add to a family's class."""


HEADER_CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("dtype"), st.sampled_from(DTYPES) | JUNK),
        st.tuples(st.just("shape"), st.lists(NUMBERS, max_size=4) | JUNK),
        st.tuples(st.just("data_offsets"), st.lists(NUMBERS, max_size=3) | JUNK),
        st.tuples(st.just("name"), st.sampled_from(["", "a" * 2000, "model.layers.9.x", "\0", "model.layers.-1.x"])),
        st.tuples(st.just("all"), st.sampled_from(DTYPES)),
        st.tuples(st.just("whole"), JUNK),
        st.tuples(st.just("__metadata__"), JUNK | st.dictionaries(st.text(max_size=3), JUNK, max_size=2)),
    ),
    max_size=3,
)


def with_header(data: bytes, changes: list[tuple[str, Any]], place: int, length: int | None) -> bytes:
    """A safetensors file with a changed header, whose length is right unless it is given."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    for kind, value in changes:
        name = names[place % len(names)]
        if kind == "__metadata__":
            header[kind] = value
        elif kind == "all":  # of the same size, so that only the dtype is odd
            for one in names:
                if isinstance(header.get(one), dict):
                    header[one]["dtype"] = value
        elif kind == "whole":
            header[name] = value
        elif kind == "name" and name in header:
            header[value] = header.pop(name)
        elif isinstance(header.get(name), dict):
            header[name][kind] = value
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data[8 + size :]


@settings(max_examples=60)
@given(
    st.sampled_from(["single", "fp8 blocks", "GPTQ desc_act"]),
    HEADER_CHANGES,
    st.integers(0, 1000),
    st.none() | st.sampled_from([0, 1, 7, 10**6, 2**31, 2**63, 2**64 - 1]),
    st.booleans(),
)
def test_a_changed_header_of_tensors(tmp_path_factory, originals, original, changes, place, length, is_loaded):
    with copied(tmp_path_factory, originals[original]) as folder:
        data = with_header((originals[original] / SINGLE_FILE).read_bytes(), changes, place, length)
        write(folder / SINGLE_FILE, data)
        with suppress(UsageError):
            use(folder)
            if is_loaded:
                load(open_checkpoint(folder))
        with suppress(ValueError, RecursionError):
            parse_header(data)


@settings(max_examples=40)
@given(FLIPS, st.integers(0, 60_000), st.booleans())
def test_a_file_of_tensors_with_changed_and_missing_bytes(tmp_path_factory, originals, flips, cut, is_cut):
    with copied(tmp_path_factory, originals["single"]) as folder:
        data = (originals["single"] / SINGLE_FILE).read_bytes()
        changed = flipped(data, flips, within=3000)  # the header, and a little more
        write(folder / SINGLE_FILE, changed[:cut] if is_cut else changed)
        with suppress(UsageError):
            use(folder)


INDEX_VALUES: Any = JUNK | st.sampled_from(
    ["model-00001-of-00009.safetensors", "model.bin", "a" * 300 + ".safetensors"]
)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1000), INDEX_VALUES), max_size=4), JUNK, st.integers(0, 9))
def test_a_changed_index(tmp_path_factory, originals, changes, junk, kind):
    with copied(tmp_path_factory, originals["sharded"]) as folder:
        index = json.loads((originals["sharded"] / INDEX_FILE).read_text())
        names = sorted(index["weight_map"])
        for place, value in changes:
            index["weight_map"][names[place % len(names)]] = value
        wrong = {0: junk, 1: {"weight_map": junk}, 2: {"weight_map": list(index["weight_map"].items())}}
        write(folder / INDEX_FILE, json.dumps(wrong.get(kind, index)).encode())
        with suppress(UsageError):
            use(folder)


GENERATION = [
    *("temperature", "top_p", "top_k", "do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "max_length"),
    *(
        "num_beams",
        "repetition_penalty",
        "guidance_scale",
        "cache_implementation",
        "watermarking_config",
        "suppress_tokens",
    ),
    *("bad_words_ids", "forced_eos_token_id", "compile_config", "transformers_version", "unknown", "stop_strings"),
    *("min_length", "num_return_sequences", "cache_config", "prompt_lookup_num_tokens", "assistant_early_exit"),
]


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(GENERATION), JUNK | st.lists(NUMBERS, max_size=2), max_size=3))
def test_changed_generation_settings(tmp_path_factory, originals, changes):
    with copied(tmp_path_factory, originals["single"]) as folder:
        path = folder / "generation_config.json"
        settings_before = json.loads(path.read_text()) if path.exists() else {}
        path.unlink(missing_ok=True)
        path.write_text(json.dumps({**settings_before, **changes}))
        with suppress(CheckpointError):
            open_checkpoint(folder).generation_config()


CONFIG_VALUES: Any = st.one_of(
    JUNK,
    st.sampled_from(
        ["load", "int8", "bool", "float8_e4m3fn", "float16", "nn", "hub/kernel", "flash_attention_2", "eager"]
    ),
    st.sampled_from(
        [
            {"quant_method": method, "bits": 4, "load_in_4bit": True}
            for method in ("bitsandbytes", "gptq", "awq", "fp8", "mxfp4", "torchao", "compressed-tensors", "nothing")
        ]
    ),
    st.sampled_from([{"rope_type": kind, "factor": 2.0} for kind in ("linear", "dynamic", "yarn", "llama3", "x")]),
)
CONFIG = [
    *("dtype", "torch_dtype", "attn_implementation", "_attn_implementation", "quantization_config", "rope_scaling"),
    *("rope_parameters", "auto_map", "tie_word_embeddings", "hidden_act", "num_labels", "id2label", "architectures"),
    *("pad_token_id", "vocab_size", "head_dim", "num_key_value_heads", "intermediate_size", "rms_norm_eps", "mlp_bias"),
    *("attention_bias", "layer_types", "initializer_range", "use_cache", "max_position_embeddings", "is_decoder"),
    *("experts_implementation", "_experts_implementation", "dtype", "sliding_window", "output_attentions"),
    *("chunk_size_feed_forward", "problem_type", "transformers_version", "base_model_tp_plan", "torchscript"),
]


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(CONFIG), CONFIG_VALUES, min_size=1, max_size=2))
def test_a_model_with_a_changed_config_is_loaded_or_refused(tmp_path_factory, originals, changes):
    with copied(tmp_path_factory, originals["single"]) as folder:
        config = json.loads((folder / "config.json").read_text())
        write(folder / "config.json", json.dumps({**config, **changes}).encode())
        with suppress(UsageError):
            checkpoint = open_checkpoint(folder)
            resolve_dtype("auto", checkpoint.config)
            load(checkpoint)


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from(["format", "model", "revision", "digests", "x"]), JUNK, max_size=2),
    FLIPS,
    st.booleans(),
)
def test_a_changed_file_of_digests(tmp_path_factory, changes, flips, are_bytes):
    path = tmp_path_factory.mktemp("digests") / "digests.json"
    data = encode_digest_file("a model", "main", ["0123456789ab", None])
    path.write_bytes(data)
    assert read_digest_file(path).by_block == {0: "0123456789ab"}
    value = {**json.loads(data), **changes}
    path.write_bytes(flipped(data, flips) if are_bytes else json.dumps(value).encode())
    with suppress(DigestFileError):
        read_digest_file(path)
    shutil.rmtree(path.parent)


WIDTH = 4
BASE = BaseModel("model", "main", WIDTH, 3)


@settings(max_examples=80)
@given(HEADER_CHANGES, st.integers(0, 9), st.none() | st.sampled_from([0, 7, 10**6, 2**63]), FLIPS, st.booleans())
def test_changed_exits(tmp_path_factory, changes, place, length, flips, are_bytes):
    folder = tmp_path_factory.mktemp("exits")
    lens = ExitLens(torch.eye(WIDTH), torch.zeros(WIDTH))
    TrainedExits(BASE, {1: lens}, {2: ExitClassifier(torch.ones(WIDTH), torch.zeros(1))}).save(folder)
    assert TrainedExits.load(folder, BASE).lenses
    data = (folder / EXITS_FILE).read_bytes()
    changed = flipped(data, flips) if are_bytes else with_header(data, copy.deepcopy(changes), place, length)
    (folder / EXITS_FILE).write_bytes(changed)
    with suppress(UsageError):
        TrainedExits.load(folder, BASE)
    shutil.rmtree(folder)
