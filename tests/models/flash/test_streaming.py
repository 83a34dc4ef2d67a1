"""Streamed blocks compute what blocks in memory compute, bit for bit, and are read as rarely as possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.flash.memory_store import MemoryStore
from swarm.data_structures import Span, StepLayout
from swarm.errors import DriveFailed, NotEnoughMemory
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.models.flash.block_plan import FlashBlock, take_out
from swarm.models.flash.memory_shares import needed_bytes
from swarm.models.flash.records import Indices, PendingRead, RecordBuffer
from swarm.models.flash.streaming import BlockStream, plan_streamed
from swarm.models.loading.span_loading import load_span
from tests import zoo

PROMPT = torch.randn(11, 64, generator=torch.Generator().manual_seed(5))


class LateStore(MemoryStore):
    """Delivers only when it is waited for, and scribbles into the buffer before. Notes what was read."""

    log: list[int]
    number: int
    broken = False

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        self.log.append(self.number)
        buffer.data.fill_(255)

        class Late:
            def wait(late) -> None:
                if self.broken:
                    raise DriveFailed("the drive is gone")
                MemoryStore.read(self, records, buffer, slots)

        return Late()


def streamed(block: nn.Module, number: int, log: list[int]) -> FlashBlock:
    """The block, with its matrices moved into a store."""
    plan = plan_streamed(block)
    assert plan is not None
    tensors = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    shapes = {name: tuple(tensors[name].shape) for name in plan.axes}
    store = LateStore(plan.layout(shapes, torch.float32), tensors)
    store.log, store.number = log, number
    taken = take_out(block, plan)
    for module in taken.values():
        module.to("meta")
    return FlashBlock(block, plan, taken, {name: tensors[name] for name in plan.resident}, store)


def stream_span(model: SpanModel, budget_of_sizes) -> tuple[BlockStream, list[int]]:
    log: list[int] = []
    blocks = [streamed(layer, number, log) for number, layer in enumerate(model.layers)]
    return BlockStream(blocks, budget_of_sizes([one.store.layout.stride for one in blocks])), log


def load(folder: Path) -> SpanModel:
    whole = Span(0, zoo.BLOCKS)
    return load_span(open_checkpoint(folder), whole, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return zoo.make_checkpoint("llama", tmp_path_factory.mktemp("zoo") / "llama")


def run_schedule(model: SpanModel) -> list[torch.Tensor]:
    """A prompt, a few steps, a rollback, and another session in between."""
    hidden = PROMPT[:, : model.hidden_size].contiguous()
    one, other = SessionCache(model), SessionCache(model)
    return [
        one.step(hidden[:5], StepLayout((0,), (5,))),
        other.step(hidden, StepLayout((0,), (11,))),
        one.step(hidden[5:6], StepLayout((5,), (1,))),
        one.step(hidden[6:7], StepLayout((6,), (1,))),
        one.step(hidden[8:10], StepLayout((5,), (2,))),
    ]


@pytest.mark.parametrize("family", zoo.REPRESENTATIVES)
def test_families_compute_the_same_bits(family, tmp_path):
    folder = zoo.make_checkpoint(family, tmp_path / family)
    expected = run_schedule(load(folder))
    model = load(folder)
    parameters = sum(p.numel() for p in model.layers.parameters())
    stream, _ = stream_span(model, needed_bytes)
    assert stream.streamed == zoo.BLOCKS
    in_memory = sum(p.numel() for layer in model.layers for n, p in layer.named_parameters() if p.ndim < 2)
    in_store = sum(field.values for store in stream._stores for field in store.layout.fields)
    assert in_store > 0.95 * (parameters - in_memory), "matrices stay in memory"
    for result, right in zip(run_schedule(model), expected, strict=True):
        assert torch.equal(result, right)


def test_biases_stay_in_memory_and_matrices_of_another_dtype_too(tmp_path):
    block = load(zoo.make_checkpoint("opt", tmp_path / "opt")).layers[0].bfloat16()
    block.fc2.float()
    plan = plan_streamed(block)
    assert "fc1.bias" in plan.resident
    assert "fc2" not in plan.modules
    assert plan_streamed(nn.Sequential(nn.LayerNorm(4))) is None


@pytest.mark.parametrize("resident", [0, 1, 3, zoo.BLOCKS])
def test_any_number_of_blocks_stays_in_memory(llama, resident):
    model, expected = load(llama), run_schedule(load(llama))

    def budget(sizes: list[int]) -> int:
        return resident * sizes[0] + (2 * sizes[0] if resident < zoo.BLOCKS else 0)

    stream, _ = stream_span(model, budget)
    # What would stand beside two buffers alone stays in memory instead.
    assert stream.streamed == (0 if resident + 2 >= zoo.BLOCKS else zoo.BLOCKS - resident)
    for result, right in zip(run_schedule(model), expected, strict=True):
        assert torch.equal(result, right)
    assert stream.memory_bytes <= budget([store.layout.stride for store in stream._stores])


def test_a_block_is_read_once_a_forward_and_before_it_is_needed(llama):
    model = load(llama)
    _, log = stream_span(model, needed_bytes)
    hidden = torch.randn(1, 1, model.hidden_size)
    for _ in range(4):
        model.forward(hidden)
    # Each forward reads every block once; the last read is the first block of the next forward.
    assert log == [*range(zoo.BLOCKS)] * 4 + [0]


def test_parts_of_the_span_and_any_order_of_sessions(llama):
    model, reference = load(llama), load(llama)
    stream_span(model, needed_bytes)
    hidden = torch.randn(1, 3, model.hidden_size)
    for span in (Span(2, 4), Span(0, 6), Span(5, 6), Span(3, 6), Span(0, 1), Span(0, 1)):
        assert torch.equal(model.narrowed(span).forward(hidden), reference.narrowed(span).forward(hidden)), span


def test_a_read_that_fails_is_an_error_of_that_forward_only(llama):
    model, reference = load(llama), load(llama)
    stream, _ = stream_span(model, needed_bytes)
    hidden = torch.randn(1, 2, model.hidden_size)
    stream._stores[3].broken = True
    for _ in range(3):
        with pytest.raises(DriveFailed):
            model.forward(hidden)
    assert torch.equal(model.narrowed(Span(0, 2)).forward(hidden), reference.narrowed(Span(0, 2)).forward(hidden))
    stream._stores[3].broken = False
    assert torch.equal(model.forward(hidden), reference.forward(hidden))


def test_a_budget_below_two_blocks_is_refused(llama):
    with pytest.raises(NotEnoughMemory, match="2 times the largest"):
        stream_span(load(llama), lambda sizes: needed_bytes(sizes) - 1)
