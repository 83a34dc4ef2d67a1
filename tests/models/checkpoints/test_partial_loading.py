"""Building part of a model: what two threads of one process do to each other."""

from __future__ import annotations

import threading

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from swarm.models.checkpoints.partial_loading import load_partial_model
from tests.zoo import TABLE

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
        loaded.append(load_partial_model(LlamaForCausalLM, CONFIG, cut, weights, torch.float32))

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
