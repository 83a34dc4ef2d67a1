"""Building part of a model: what two threads of one process do to each other."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel
from transformers.core_model_loading import MergeModulelist

from swarm.errors import CheckpointError
from swarm.models.block_loading import fill_block, read_block
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.partial_loading import load_partial_model
from tests.zoo import TABLE, make_checkpoint, make_model

CONFIG = LlamaConfig(**{**TABLE["llama"], "tie_word_embeddings": True})


def test_one_model_is_loaded_at_a_time() -> None:
    """transformers replaces `tie_weights` of all models while it builds one."""
    weights = LlamaForCausalLM(CONFIG).state_dict()
    del weights["lm_head.weight"]
    tie_weights = PreTrainedModel.tie_weights
    second_built = threading.Event()
    built_meanwhile: list[bool] = []
    loaded: list[LlamaForCausalLM] = []

    def load(cut) -> None:
        loaded.append(load_partial_model(LlamaForCausalLM, CONFIG, cut, dict(weights), torch.float32))

    second = threading.Thread(target=load, args=(lambda model: second_built.set(),))

    def cut_first(model: PreTrainedModel) -> None:
        second.start()
        built_meanwhile.append(second_built.wait(0.5))

    load(cut_first)
    second.join()
    assert built_meanwhile == [False]
    assert second_built.is_set()
    assert PreTrainedModel.tie_weights is tie_weights
    for model in loaded:
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_config_that_describes_much_more_than_is_stored():
    """Otherwise all of it is made in memory before it turns out that there is nothing to fill it with."""
    weights = LlamaForCausalLM(CONFIG).state_dict()
    huge = copy.deepcopy(CONFIG)
    huge.vocab_size = 1 << 26
    with pytest.raises(CheckpointError, match=r"describes 42\d{8} values"):
        load_partial_model(LlamaForCausalLM, huge, lambda model: None, weights, torch.float32)


def test_a_head_that_the_checkpoint_lacks_may_be_as_large_as_it_is():
    weights = LlamaForCausalLM(CONFIG).state_dict()
    large = copy.deepcopy(CONFIG)
    large.num_labels = 200_000
    model = load_partial_model(
        LlamaForSequenceClassification,
        large,
        lambda model: None,
        {name: one for name, one in weights.items() if name != "lm_head.weight"},
        torch.float32,
        lambda name: name.startswith("score."),
    )
    assert model.score.weight.shape == (200_000, CONFIG.hidden_size)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_are_not_held_twice_to_fuse_them(kind, tmp_path, monkeypatch):
    """transformers stacks the experts, and then joins the stacks."""
    whole = make_model(kind)
    checkpoint = open_checkpoint(make_checkpoint(kind, tmp_path))
    tensors = read_block(checkpoint, 5, torch.float32)
    assert sum("experts." in name for name in tensors) >= 12, "they are stored one by one"

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("transformers fuses the experts")

    monkeypatch.setattr(MergeModulelist, "convert", fail)
    block = fill_block(checkpoint, 5, torch.float32, tensors).layers[0].state_dict()
    for name, one in whole.model.layers[5].state_dict().items():
        assert block[name].equal(one), name
    assert not tensors

    tensors = read_block(checkpoint, 5, torch.float32)
    name = next(one for one in tensors if "experts.1." in one)
    tensors[name] = tensors[name][:-1]
    with pytest.raises(CheckpointError, match=r"block 5 .*experts.* different shapes"):
        fill_block(checkpoint, 5, torch.float32, tensors)
