"""Arguments of `from_pretrained` that make no sense together are refused before anybody is asked."""

from __future__ import annotations

from typing import Any

import pytest

from swarm import AutoDistributedModelForCausalLM, AutoDistributedModelForSequenceClassification
from swarm.client.tuning.options import TuningOptions, tuning_options
from swarm.errors import InvalidOption, UnsupportedModel
from tests.zoo import config_of

NOTHING: dict[str, Any] = {
    "tuning_mode": None,
    "pre_seq_len": None,
    "lora_config": None,
    "lora_rank": None,
    "lora_alpha": None,
    "target_modules": None,
    "adapter": None,
    "adapter_revision": None,
    "force_adapter": False,
    "trainable": None,
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tuning_mode": "prefix"}, "tuning_mode='prefix' is not one of ptune"),
        ({"tuning_mode": "lora", "pre_seq_len": 4}, "pre_seq_len is for virtual tokens"),
        ({"pre_seq_len": 4}, "say tuning_mode"),
        ({"tuning_mode": "ptune", "pre_seq_len": 0}, "pre_seq_len=0"),
        ({"tuning_mode": "ptune", "pre_seq_len": 10**6}, "pre_seq_len=1000000"),
        ({"tuning_mode": "ptune", "lora_rank": 4}, "lora_rank is for LoRA"),
        ({"target_modules": ["q_proj"]}, "target_modules is for LoRA"),
        ({"tuning_mode": "lora", "lora_rank": 0}, "lora_rank=0"),
        ({"tuning_mode": "lora", "lora_config": {"lora_dropout": 0.1}}, "lora_dropout"),
        ({"tuning_mode": "lora", "adapter": "folder", "lora_alpha": 4}, "the adapter folder has its own"),
        ({"trainable": True}, "say adapter="),
        ({"adapter_revision": "main"}, "say adapter="),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        tuning_options(**{**NOTHING, **given})


@pytest.mark.parametrize(
    ("given", "trainable"),
    [
        ({}, True),
        ({"tuning_mode": "ptune"}, True),
        ({"adapter": "folder"}, False),
        ({"adapter": "folder", "trainable": True}, True),
        ({"adapter": "folder", "tuning_mode": "lora"}, True),
        ({"adapter": "folder", "tuning_mode": "lora", "trainable": False}, False),
    ],
)
def test_an_adapter_is_frozen_unless_training_goes_on(given: dict[str, Any], trainable: bool) -> None:
    options = tuning_options(**{**NOTHING, **given})
    assert isinstance(options, TuningOptions)
    assert options.trainable is trainable


def test_classes_are_counted_for_classification_only() -> None:
    with pytest.raises(InvalidOption, match="num_labels is for classification"):
        AutoDistributedModelForCausalLM.from_pretrained(num_labels=3)
    with pytest.raises(InvalidOption, match="num_labels=0"):
        AutoDistributedModelForSequenceClassification.from_pretrained(num_labels=0)


def test_a_family_that_cannot_classify_is_named_before_anybody_is_asked(tmp_path: Any) -> None:
    config_of("granite").save_pretrained(tmp_path)
    peer = "/ip4/127.0.0.1/tcp/9/p2p/QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
    with pytest.raises(UnsupportedModel, match="granite"):
        AutoDistributedModelForSequenceClassification.from_pretrained(tmp_path, initial_peers=[peer])
