"""Finding, cutting and renumbering layers of small modules that are made here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swarm.data_structures import Span
from swarm.errors import UnsupportedModel
from swarm.models.cutting import cut_layers


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.attention.layer_idx = number
        self.layer_id = number


class Decoder(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(blocks))
        self.layers = nn.ModuleList(Layer(number) for number in range(blocks))
        self.embed = nn.Embedding(3, 2)
        self.norm = nn.LayerNorm(2)
        self.dropout = nn.Dropout()


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.decoder = Decoder(blocks)


def test_the_list_of_layers_is_found_by_its_length_and_is_no_list_of_experts():
    model = Model(4)
    path, owner, name = cut_layers.find_layers(model, 4)
    assert (path, name) == ("decoder.layers", "layers")
    assert owner is model.decoder


def test_a_model_without_such_a_list_is_refused():
    with pytest.raises(UnsupportedModel, match="no list of 5 layers"):
        cut_layers.find_layers(Model(4), 5)


def test_config_lists_with_an_entry_a_block_are_sliced():
    config = SimpleNamespace(
        num_hidden_layers=4,
        layer_types=["a", "b", "c", "d"],
        windows=(1, 2, 3, 4),
        architectures=["four", "names", "of", "classes"],
        eos_token_id=[1, 2],
    )
    cut_layers.slice_config(config, Span(1, 3), 4)
    assert config.num_hidden_layers == 2
    assert config.layer_types == ["b", "c"]
    assert config.windows == (2, 3)
    assert len(config.architectures) == 4
    assert config.eos_token_id == [1, 2]


def test_dropped_weights_are_replaced_by_modules_that_let_hidden_states_pass():
    decoder = Decoder(2)
    cut_layers.drop_weights(decoder, keep=("layers",))
    assert {name.split(".")[0] for name, _ in decoder.named_parameters()} == {"layers"}
    assert isinstance(decoder.dropout, nn.Dropout)
    hidden = torch.ones(1, 3, 2)
    assert decoder.norm(hidden) is hidden
    assert decoder.norm(None, hidden_states=hidden) is hidden


def test_a_dropped_embedding_adds_nothing_whatever_it_is_called_with():
    decoder = Decoder(2)
    cut_layers.drop_weights(decoder, keep=("layers",))
    hidden = torch.ones(1, 3, 2, dtype=torch.bfloat16)
    for indices in (torch.arange(3), torch.ones(1, 3)):  # OPT gives it a mask of floats
        assert torch.equal(hidden + decoder.embed(indices, 7), hidden)
        assert (hidden + decoder.embed(indices)).dtype == torch.bfloat16


def test_a_narrowed_model_shares_weights_and_leaves_the_wide_one_alone():
    model = Model(4)
    model.config = model.decoder.config = SimpleNamespace(num_hidden_layers=4, layer_types=list("abcd"))
    narrow = cut_layers.slice_model(model, "decoder.layers", 1, 3)
    assert list(narrow.decoder.layers) == list(model.decoder.layers[1:3])
    assert narrow.config.layer_types == narrow.decoder.config.layer_types == ["b", "c"]
    assert len(model.decoder.layers) == model.config.num_hidden_layers == 4
