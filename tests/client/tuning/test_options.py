"""Arguments of `from_pretrained` that make no sense together are refused before anybody is asked."""

from __future__ import annotations

from typing import Any

import pytest

from swarm import AutoDistributedModelForCausalLM, AutoDistributedModelForSequenceClassification
from swarm.client.tuning.options import TuningConfig, TuningOptions, resolve_tuning
from swarm.errors import InvalidOption


def resolve(given: dict[str, Any]) -> TuningConfig:
    options = dict(given)
    mode, adapter = options.pop("tuning_mode", None), options.pop("adapter", None)
    return resolve_tuning(mode, adapter, TuningOptions(**options))


def test_contradicting_options_are_refused() -> None:
    for given, said in [
        ({"tuning_mode": "prefix"}, "tuning_mode='prefix' is not one of ptune"),
        ({"tuning_mode": "lora", "pre_seq_len": 4}, "pre_seq_len is for virtual tokens"),
        ({"pre_seq_len": 4}, "add tuning_mode"),
        ({"tuning_mode": "ptune", "pre_seq_len": 0}, "pre_seq_len=0"),
        ({"tuning_mode": "ptune", "pre_seq_len": 10**6}, "pre_seq_len=1000000"),
        ({"tuning_mode": "ptune", "lora_rank": 4}, "lora_rank is for LoRA"),
        ({"target_modules": ["q_proj"]}, "target_modules is for LoRA"),
        ({"tuning_mode": "lora", "lora_rank": 0}, "lora_rank=0"),
        ({"tuning_mode": "lora", "lora_config": {"lora_dropout": 0.1}}, "lora_dropout"),
        ({"tuning_mode": "lora", "adapter": "folder", "lora_alpha": 4}, "the adapter folder has its own"),
        ({"trainable": True}, "add adapter="),
        ({"adapter_revision": "main"}, "add adapter="),
    ]:
        with pytest.raises(InvalidOption, match=said):
            resolve(given)


def test_an_adapter_is_frozen_unless_training_goes_on() -> None:
    for given, trainable in [
        ({}, True),
        ({"tuning_mode": "ptune"}, True),
        ({"adapter": "folder"}, False),
        ({"adapter": "folder", "trainable": True}, True),
        ({"adapter": "folder", "tuning_mode": "lora"}, True),
        ({"adapter": "folder", "tuning_mode": "lora", "trainable": False}, False),
    ]:
        config = resolve(given)
        assert isinstance(config, TuningConfig)
        assert config.trainable is trainable


def test_classes_are_counted_for_classification_only() -> None:
    with pytest.raises(InvalidOption, match="num_labels is for classification"):
        AutoDistributedModelForCausalLM.from_pretrained(num_labels=3)
    with pytest.raises(InvalidOption, match="num_labels=0"):
        AutoDistributedModelForSequenceClassification.from_pretrained(num_labels=0)
