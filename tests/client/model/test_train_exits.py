"""Lenses and classifiers that are trained over real servers."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swarm import EarlyExit
from swarm.client.model.generation_loop import ModelForward
from swarm.client.model.train_exits import LensFit, fit_classifier, hidden_states, read_hidden
from swarm.client.tuning.options import TuningOptions
from swarm.common import console
from swarm.errors import AdapterMismatch, NoExitClassifiers, UsageError
from tests import zoo
from tests.client import prompts
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.zoo import BLOCKS


@pytest.fixture
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm, dtype="float32", wire="none") as model:
        yield model


def text(tokens: int = 2400) -> torch.Tensor:
    return torch.randint(3, 100, (tokens,), generator=torch.Generator().manual_seed(0))


def greedy(model: Any, **more: Any) -> torch.Tensor:
    return prompts.greedy(model, text(7).unsqueeze(0), 16, **more)


def test_hidden_states_are_those_of_the_local_model(model, local):
    tokens = text(20).view(2, 10)
    found = hidden_states(model, tokens, [2, 3, BLOCKS])
    with torch.no_grad():
        expected = local(tokens, output_hidden_states=True)
    for block in (2, 3):
        torch.testing.assert_close(found[block], expected.hidden_states[block], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read_hidden(model, found[BLOCKS]), expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["ptune", "deep_ptune"])
def test_hidden_states_behind_virtual_tokens(swarm, mode):
    tuning = TuningOptions(pre_seq_len=3)
    with run_client(swarm, dtype="float32", wire="none", tuning_mode=mode, tuning=tuning) as model:
        for prompts_of in (model.prompts, model.deep_prompts):
            if prompts_of is not None:
                prompts_of.data.normal_(generator=torch.Generator().manual_seed(1))
        tokens = text(20).view(2, 10)
        found = hidden_states(model, tokens, [2, BLOCKS])
        assert found[2].shape == found[BLOCKS].shape == (2, 10, model.config.hidden_size)
        with torch.no_grad():
            expected = model(input_ids=tokens).logits
        torch.testing.assert_close(read_hidden(model, found[BLOCKS]), expected, rtol=1e-4, atol=1e-4)
        quality = model.train_exits([text()], progress=lambda *_: None)
        assert sum(one.after for one in quality) > sum(one.before for one in quality)


def test_progress_is_shown(model, monkeypatch, caplog):
    monkeypatch.setattr(console, "PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO):
        model.train_exits([text(600)], boundaries=[2])
    said = [one for one in caplog.messages if one.startswith("Training exits: ")]
    assert said[0].startswith("Training exits: 1 of ")
    assert len(said) == int(said[0].split(" of ")[1].split()[0]) - 1, "each part but the last"


def test_tokens_on_their_way_are_read_as_the_model_reads_them(model):
    forward, calls = ModelForward(model, {}, 1), []
    model.register_forward_hook(lambda *_: calls.append(1))
    states = torch.randn(4, 2, 1, model.config.hidden_size)
    found = [forward.logits(hidden_R1H) for hidden_R1H in states]
    assert len(calls) == 3, "traced by two and compared"
    assert all(one.equal(read_hidden(model, hidden)[:, -1]) for one, hidden in zip(found, states, strict=True))


def test_a_lens_helps_and_changes_no_verified_text(model, local, tmp_path):
    done: list[tuple[int, int]] = []
    quality = model.train_exits([text()], progress=lambda *numbers: done.append(numbers))
    assert [one.block for one in quality] == [2, 3]
    assert sum(one.after for one in quality) > sum(one.before for one in quality)
    assert done[-1][0] == done[-1][1] == len(done)
    assert greedy(model, early_exit=EarlyExit(threshold=0.0)).equal(greedy(local))
    early = greedy(model, early_exit=EarlyExit(threshold=0.0, verify=False))
    model.save_exits(tmp_path)
    model.exits = None
    assert not greedy(model, early_exit=EarlyExit(threshold=0.0, verify=False)).equal(early)
    model.load_exits(tmp_path)
    assert greedy(model, early_exit=EarlyExit(threshold=0.0, verify=False)).equal(early)


def test_a_client_in_half_precision_trains_and_uses_exits(swarm):
    with run_client(swarm, dtype="bfloat16", wire="none") as model:
        quality = model.train_exits([text()])
        assert sum(one.after for one in quality) > sum(one.before for one in quality)
        expected = greedy(model, early_exit=None)
        assert greedy(model, early_exit=EarlyExit(threshold=0.0)).equal(expected)


def test_learned_positions_end_before_the_tokens_that_are_read(tmp_path):
    folder = zoo.make_checkpoint("gpt2", tmp_path)
    with run_swarm(folder, ("0:3", "3:6"), dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        assert model.train_exits([text(4800)], boundaries=[3])[0].after > 0


def test_a_classifier_is_asked_where_there_is_one(model, local):
    exits = EarlyExit(confidence="classifier", threshold=0.3)
    with pytest.raises(NoExitClassifiers, match="no classifier for any of the blocks 2, 3"):
        greedy(model, early_exit=exits)
    model.train_exits([text()], kind="classifier")
    assert greedy(model, early_exit=exits).equal(greedy(local))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "oracle"}, "is not one of lens"),
        ({"boundaries": [0, 2]}, "in front of blocks 1 to 5"),
        ({"boundaries": [6]}, "in front of blocks 1 to 5"),
        ({"boundaries": []}, "in front of blocks 1 to 5"),
        ({"texts": []}, "have to be longer"),
    ],
)
def test_bad_arguments(model, arguments, message):
    with pytest.raises(UsageError, match=message):
        model.train_exits(**{"texts": [text()], **arguments})
    with pytest.raises(UsageError, match="nothing was trained"):
        model.save_exits("nowhere")


def test_exits_of_another_revision(model, tmp_path):
    model.train_exits([text()], boundaries=[2])
    model.save_exits(tmp_path)
    model.swarm.identity = type(model.swarm.identity)("other", "another revision", BLOCKS)
    with pytest.raises(AdapterMismatch, match="train exits for it"):
        model.load_exits(tmp_path)


WIDTH = 12


def test_a_lens_finds_the_map_between_what_it_saw():
    random = torch.Generator().manual_seed(0)
    turned = torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH, generator=random)
    head = torch.randn(WIDTH, 3 * WIDTH, generator=random, requires_grad=True)

    def read(hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ head

    fit, batches = LensFit(WIDTH, read), 60
    for number in range(batches):
        hidden = torch.randn(2048, WIDTH, generator=random)
        fit.learn(hidden, hidden @ turned, len(hidden), number / batches)
    other = torch.randn(500, WIDTH, generator=random)
    right = read(other @ turned).argmax(-1)
    assert (read(other).argmax(-1) == right).float().mean() < 0.6
    assert (read(fit.lens()(other)).argmax(-1) == right).float().mean() > 0.9
    assert fit.lens()(other.bfloat16()).dtype == torch.bfloat16
    assert head.grad is None


def test_a_classifier_tells_apart_what_a_direction_tells_apart():
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(2000, WIDTH, generator=random) * 3 + 5
    direction = torch.randn(WIDTH, generator=random)
    is_right = (hidden - 5) @ direction > 1.0
    classifier = fit_classifier(hidden, is_right)
    found = classifier(hidden) > 0.5
    assert (found == is_right).float().mean() > 0.97
    assert classifier(hidden.half()[0]).dtype == torch.float32
