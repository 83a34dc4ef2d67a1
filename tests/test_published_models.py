"""Models as they are published, over three real servers: texts are those of transformers' own load of the same files.

Also with left padding, early exits, beams, guesses that are taken back, a session of another length beside, and a
server that dies in the middle of a text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from swarm import EarlyExit
from swarm.client.early_exit import exit_decoder
from tests import wrappers, zoo
from tests.client.prompts import PAD, padded_batch, prompt
from tests.disturbances import holder, write
from tests.models.checkpoints import gguf_layouts, packed_layouts
from tests.slow import slow_except
from tests.swarms import TestSwarm, run_client, run_swarm

SPANS = ("0:2", "2:3", "2:3", "3:6")  # the second and last begin in the middle of every pattern
LONG = 60
NEW = 12
KILLED_BEFORE = 5
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}


def wrapped(kind: str) -> Callable[[Path], PreTrainedModel]:
    """Saves a wrapper, and returns what transformers loads from there."""

    def make(folder: Path) -> PreTrainedModel:
        wrappers.save(wrappers.make_wrapper(kind), folder)
        model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        return model

    return make


def plain(family: str) -> Callable[[Path], PreTrainedModel]:
    """Saves a model of the zoo, and returns what transformers loads from there."""

    def make(folder: Path) -> PreTrainedModel:
        zoo.make_checkpoint(family, folder)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model

    return make


WRAPPED = (
    *("gemma3", "gemma4", "llama4", "mistral3 (mistral4)", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("lfm2_vl", "dots3_note"),
)
MODELS: dict[str, Callable[[Path], PreTrainedModel]] = {
    **{kind: wrapped(kind) for kind in WRAPPED},
    **{family: plain(family) for family in (*zoo.HYBRIDS, "deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text")},
}


@pytest.mark.parametrize("name", slow_except(MODELS, "gemma4", "qwen3_5"))
def test_texts_are_those_of_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(exit_decoder, "MIN_GAIN", 0.0)  # look also at servers that are so near that it is not worth it
    local = MODELS[name](tmp_path / "model")
    with run_swarm(tmp_path / "model", SPANS, dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        check_texts(swarm, model, local)


PACKED = {
    "MXFP4": "gpt_oss",
    "fp8 blocks of 32": "qwen3_moe",
    **dict.fromkeys(("compressed-tensors int4", "AWQ", "GPTQ desc_act", "ModelOpt NVFP4", "MXFP8"), "llama"),
}


@pytest.mark.parametrize("layout", slow_except(PACKED, "fp8 blocks of 32"))
def test_texts_of_packed_weights(layout, tmp_path):
    """Those of transformers' own load of the files, or where it needs a package for that, of the plain weights that
    they mean; from servers of which two hold the weights packed, and one has unpacked them."""
    if layout == "MXFP4":
        folder = plain_folder = packed_layouts.make_mxfp4(tmp_path / "packed", torch.float32)
    else:
        folder, plain_folder = packed_layouts.make(layout, tmp_path, PACKED[layout])
    local = AutoModelForCausalLM.from_pretrained(folder if "fp8" in layout else plain_folder, dtype=torch.float32)
    with run_swarm(folder, ("0:1", "1:2"), dtype="float32", quant="packed") as swarm:
        swarm.start("1:2", dtype="float32", quant="none").wait_ready()
        with run_client(swarm, dtype="float32") as model:
            check_texts(swarm, model, local, killed=1)


@pytest.mark.parametrize("family", slow_except(gguf_layouts.FAMILIES, "llama"))
def test_texts_of_gguf_files(family, tmp_path):
    path = tmp_path / "model.gguf"
    local = gguf_layouts.make(family, path)
    if family in gguf_layouts.BY_TRANSFORMERS:
        local = gguf_layouts.transformers_load(path)
    with run_swarm(path, SPANS, dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        check_texts(swarm, model, local)


def check_texts(swarm: TestSwarm, model: Any, local: PreTrainedModel, killed: int = 2) -> None:
    """Everything that people do with a model, with the same result as `local`; the server of one block is killed."""
    batch = padded_batch()
    expected = local.generate(**batch, **SETTINGS)
    assert all(row.unique().numel() >= 4 for row in expected[:, -NEW:]), "text that does not vary proves nothing"
    assert model.generate(**batch, **SETTINGS).tolist() == expected.tolist()
    early = EarlyExit(threshold=0.0, batch="all")
    assert model.generate(**batch, **SETTINGS, early_exit=early).tolist() == expected.tolist()

    short = prompt(7)
    beams = local.generate(short, num_beams=3, **SETTINGS)
    assert model.generate(short, num_beams=3, **SETTINGS).tolist() == beams.tolist()

    known = local.generate(short, **SETTINGS).tolist()
    wrong = zoo.make_model("llama")  # which another model's guesses often are
    assert model.generate(short, assistant_model=wrong, **SETTINGS).tolist() == known
    with another_session(swarm):
        assert model.generate(short, **SETTINGS).tolist() == known

    def kill(session: Any) -> None:
        holder(swarm, session, killed).kill()

    assert [short[0].tolist() + write(model, short, NEW, {KILLED_BEFORE: kill})] == known


@contextmanager
def another_session(swarm: TestSwarm) -> Iterator[None]:
    """Somebody else has a long text, which grows meanwhile."""
    ended = threading.Event()
    with run_client(swarm, dtype="float32") as other, other.inference_session(max_length=2 * LONG) as session:
        session.step(other.word_embeddings(prompt(LONG, 1)))

        def go_on() -> None:
            while not ended.is_set() and session.position < 2 * LONG:
                session.step(other.word_embeddings(prompt(1, 2)))

        beside = threading.Thread(target=go_on)
        beside.start()
        try:
            yield
        finally:
            ended.set()
            beside.join()
