"""Spans from packed files, against the same spans in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm.data_structures import Span, StepLayout
from swarm.errors import AdapterRefused, NotEnoughMemory, TrainingRefused
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.execution.gradients import compute_gradients
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.preparation import add_predictor
from swarm.models.loading import flash_preparation
from swarm.models.loading.flash_loading import FlashOptions, load_flash_span
from swarm.models.loading.flash_preparation import open_prepared, plan_for_flash
from swarm.models.loading.span_loading import load_span
from tests import zoo

WHOLE = Span(0, zoo.BLOCKS)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Family to its checkpoint, made once."""
    made: dict[str, Checkpoint] = {}

    def checkpoint(family: str) -> Checkpoint:
        if family not in made:
            made[family] = open_checkpoint(zoo.make_checkpoint(family, tmp_path_factory.mktemp("zoo") / family))
        return made[family]

    return checkpoint


def load(checkpoint: Checkpoint, root: Path, memory: int = 10**9, span: Span = WHOLE, exact: bool = False) -> SpanModel:
    planned = plan_for_flash(checkpoint, span, torch.float32, root, exact)
    options = FlashOptions(memory, root, planned)
    return load_flash_span(checkpoint, span, dtype=torch.float32, options=options)


def in_memory(checkpoint: Checkpoint, span: Span = WHOLE) -> SpanModel:
    return load_span(checkpoint, span, dtype=torch.float32, device=CPU)


def with_little_memory(checkpoint: Checkpoint, root: Path) -> SpanModel:
    """The whole model in about as little memory as it can be computed with."""
    whole = in_memory(checkpoint).weight_bytes
    for eighths in range(3, 8):
        try:
            return load(checkpoint, root, whole * eighths // 8)
        except NotEnoughMemory:
            continue
    raise AssertionError("nothing is gained by reading from flash")


def run(model: SpanModel) -> torch.Tensor:
    """A prompt and steps of two sessions."""
    hidden = torch.randn(24, model.hidden_size, generator=torch.Generator().manual_seed(1))
    one, other = SessionCache(model), SessionCache(model)
    outputs = [one.step(hidden[:9], StepLayout((0,), (9,))), other.step(hidden[9:14], StepLayout((0,), (5,)))]
    outputs += [one.step(hidden[14 + n : 15 + n], StepLayout((9 + n,), (1,))) for n in range(5)]
    outputs += [other.step(hidden[19 + n : 20 + n], StepLayout((5 + n,), (1,))) for n in range(5)]
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["llama", "falcon_alibi", "mixtral", "deepseek_v3"])
def test_exact_kinds_compute_the_same_with_little_memory(family, checkpoints, tmp_path):
    checkpoint = checkpoints(family)
    model = with_little_memory(checkpoint, tmp_path)
    expected = in_memory(checkpoint)
    assert model.digests == expected.digests
    assert model.strategy == expected.strategy
    assert not model.flash.sparse
    result, right = run(model), run(expected)
    if model.flash.pools:  # the order of a sum of experts may differ
        assert (result - right).norm(dim=1).max() <= 1e-5 * right.norm(dim=1).max()
    else:
        assert torch.equal(result, right)
    counters = model.flash.use()
    assert counters.read_bytes > model.flash.record_bytes
    assert model.weight_bytes < 0.9 * expected.weight_bytes
    model.flash.close()


def test_only_the_blocks_of_the_span_are_prepared_and_kept_for_the_next_start(checkpoints, tmp_path):
    checkpoint = checkpoints("llama")
    load(checkpoint, tmp_path, span=Span(2, 4)).flash.close()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.records")}
    assert sorted(path.name for path in files) == ["block-0002.block.records", "block-0003.block.records"]
    model = load(checkpoint, tmp_path, span=Span(2, 4))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.records")} == files
    hidden = torch.randn(1, 3, model.hidden_size)
    assert torch.equal(model.forward(hidden), in_memory(checkpoint, Span(2, 4)).forward(hidden))
    model.flash.close()


def test_too_little_memory_is_refused_with_what_is_needed(checkpoints, tmp_path):
    with pytest.raises(NotEnoughMemory, match="allow more memory"):
        load(checkpoints("llama"), tmp_path, memory=1000)


def gradients(model: SpanModel, blocks: Span) -> torch.Tensor:
    hidden = torch.randn(7, model.hidden_size, generator=torch.Generator().manual_seed(2))
    layout = StepLayout((0, 0), (4, 3))
    return compute_gradients(model.narrowed(blocks), hidden, torch.ones_like(hidden), layout).inputs


def test_streamed_blocks_have_exact_gradients(checkpoints, tmp_path):
    checkpoint = checkpoints("llama")
    model = with_little_memory(checkpoint, tmp_path)
    expected = in_memory(checkpoint)
    for blocks in (WHOLE, Span(1, 5), WHOLE):
        assert torch.equal(gradients(model, blocks), gradients(expected, blocks))
    assert torch.equal(run(model), run(expected))
    model.flash.close()


def test_training_over_experts_on_flash_is_refused_by_name(checkpoints, tmp_path):
    model = load(checkpoints("mixtral"), tmp_path)
    with pytest.raises(TrainingRefused, match=r"blocks 0:6 are on flash.*train over servers"):
        gradients(model, WHOLE)
    model.flash.close()


@pytest.fixture
def text(monkeypatch) -> None:
    """Some text for models without a tokenizer."""
    tokens = torch.randint(1, zoo.VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(flash_preparation, "_text", lambda checkpoint: tokens)


def test_neurons_are_selected_with_predictors_that_are_made_at_the_first_start(checkpoints, tmp_path, text, caplog):
    checkpoint = checkpoints("opt")
    with caplog.at_level("INFO"):
        model = load(checkpoint, tmp_path)
    assert model.flash.sparse
    assert "results are APPROXIMATE" in caplog.text
    assert abs(model.flash.perplexity_loss) < 0.2
    result, exact = run(model), run(in_memory(checkpoint))
    counters = model.flash.use()
    assert 0 < counters.selected < counters.selectable
    error = (result - exact).norm() / exact.norm()
    assert 0 < error < 0.5  # of inputs that no text has
    with model.flash.exactly():
        torch.testing.assert_close(run(model), exact, rtol=1e-4, atol=1e-4)
    # The same neurons, whatever lies in memory by now; only the order of the sum differs.
    torch.testing.assert_close(run(model), result, rtol=1e-3, atol=1e-4)
    model.flash.close()
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.predictor.safetensors")}
    assert len(made) == zoo.BLOCKS
    again = load(checkpoint, tmp_path)
    assert again.flash.perplexity_loss == model.flash.perplexity_loss
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.predictor.safetensors")} == made
    again.flash.close()


def test_a_server_that_has_to_be_exact_streams_instead(checkpoints, tmp_path, text):
    model = load(checkpoints("opt"), tmp_path, exact=True)
    assert not model.flash.sparse
    assert torch.equal(run(model), run(in_memory(checkpoints("opt"))))
    model.flash.close()


def test_a_predictor_of_another_version_is_made_anew(checkpoints, tmp_path, text):
    checkpoint, span = checkpoints("opt"), Span(1, 2)
    load(checkpoint, tmp_path, span=span).flash.close()
    packed = PackedModel.of(checkpoint, torch.float32, tmp_path)
    planned = plan_for_flash(checkpoint, span, torch.float32, tmp_path, exact=False)
    (prepared,) = open_prepared(checkpoint, planned, torch.float32, tmp_path, progress=False)
    data = prepared.files.predictor.read_bytes()
    add_predictor(packed, prepared, data.replace(b"neuron predictor 2", b"neuron predictor 1"))
    load(checkpoint, tmp_path, span=span).flash.close()
    assert b"neuron predictor 2" in prepared.files.predictor.read_bytes()


def test_lora_on_modules_that_were_taken_out_is_refused_by_name(checkpoints, tmp_path, text):
    model = load(checkpoints("opt"), tmp_path, span=Span(0, 1))
    hidden = model.hidden_size
    for name, outputs in (("fc1", 48), ("fc2", hidden)):
        inputs = hidden if name == "fc1" else 48
        factors = LoraFactors(name, torch.zeros(2, inputs), torch.zeros(outputs, 2))
        with pytest.raises(AdapterRefused, match=rf"no linear module '{name}'"):
            model.adapted.prepare({0: BlockAdapterWeights(factors=(factors,))})
    model.flash.close()


def test_training_over_selected_neurons_is_refused_by_name(checkpoints, tmp_path, text):
    model = load(checkpoints("opt"), tmp_path, span=Span(0, 1))
    with pytest.raises(TrainingRefused, match="train over servers"):
        gradients(model, Span(0, 1))
    model.flash.close()
