"""What stands in for a card: it refuses what a card refuses, and replays what a graph would."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.gpu.stand_in.card import CARD, NAME, card
from swarm.data_structures import StepLayout
from swarm.models.execution.cuda_graphs import CudaGraphRecorder
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.tracing.traced_forward import TracedForward
from swarm.models.execution.trials.layout_trials import choose_layout
from swarm.models.loading.random_span import llama_config, make_random_span
from swarm.server.memory_budget import free_memory, resolve_device

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def calls():
    with card() as found:
        yield found


def test_tensors_are_where_they_were_made_moved_or_computed(calls):
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    assert (here.device.type, there.device, there.is_cuda) == ("cpu", CARD, True)
    assert here.to(CARD).device == CARD
    assert here.device.type == "cpu", "what was moved is another tensor"
    for one in (there + 1, there[1:], there.view(3, 1), there.clone(), there.new_zeros(2), torch.empty_like(there)):
        assert one.device == CARD
    assert there.cpu().device.type == "cpu"
    assert there.device == CARD
    assert there.to(torch.bfloat16).device == CARD
    assert torch.empty(2, device="meta").device.type == "meta"


def test_devices_are_named_as_ever(calls):
    assert torch.device("cuda", 0) == torch.device("cuda:0") == CARD
    assert resolve_device("auto").type == "cuda"
    assert free_memory(CARD) <= torch.cuda.get_device_properties(CARD).total_memory


def test_modules_move(calls):
    linear = nn.Linear(3, 2).to(CARD)
    assert {one.device for one in linear.parameters()} == {CARD}
    assert linear(torch.ones(1, 3, device=CARD)).device == CARD
    with pytest.raises(RuntimeError, match="same device"):
        linear(torch.ones(1, 3))
    (gradient,) = torch.autograd.grad(linear(torch.ones(1, 3, device=CARD)).sum(), [linear.weight])
    assert gradient.device == CARD


@pytest.mark.parametrize("operation", [torch.add, torch.matmul, lambda one, other: torch.cat([one, other])])
def test_operands_of_two_devices_are_refused(calls, operation):
    with pytest.raises(RuntimeError, match="found at least two devices"):
        operation(torch.ones(3, device=CARD), torch.ones(3))


def test_some_mixing_is_allowed_as_on_a_card(calls):
    there = torch.zeros(3, device=CARD)
    there.copy_(torch.ones(3))
    there[:1] = torch.full((1,), 5.0)
    assert (there * torch.tensor(2.0)).tolist() == [10.0, 2.0, 2.0]
    assert there[torch.tensor([0, 1])].device == CARD


def test_other_threads_have_the_card_too(calls):
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1, device="cuda").device))
    thread.start()
    thread.join()
    assert found == [CARD]


def test_afterwards_torch_is_as_before():
    before = (torch.cuda.is_available, torch.cuda.graph, threading.Thread.run, nn.Parameter.__new__)
    with card():
        assert torch.cuda.get_device_name() == NAME
    assert (torch.cuda.is_available, torch.cuda.graph, threading.Thread.run, nn.Parameter.__new__) == before
    assert torch.ones(1).device.type == "cpu"


def record(function):
    with torch.inference_mode():
        return CudaGraphRecorder(CARD)(function)


def test_a_replay_reads_and_writes_the_same_memory(calls):
    inputs, output = torch.ones(2, device=CARD), torch.zeros(2, device=CARD)
    log = torch.zeros(4, device=CARD)

    def double() -> None:
        output.copy_((inputs * 2).relu_())
        log[:2] += output.view(2)

    replay = record(double)
    inputs.copy_(torch.tensor([3.0, -4.0]))
    log.zero_()
    replay()
    replay()
    assert output.tolist() == [6.0, 0.0]
    assert log.tolist() == [12.0, 0.0, 0.0, 0.0]
    assert calls["graph"] == 1


def test_what_python_decided_is_a_constant_of_the_graph(calls):
    output, factors = torch.zeros(1, device=CARD), iter([2, 2, 3, 4, 5])
    replay = record(lambda: output.fill_(next(factors)))
    replay()
    assert output.tolist() == [3.0], "two runs before the capture, and then the same one again"
    replay()
    assert output.tolist() == [3.0]


@pytest.mark.parametrize(
    "waits",
    [
        lambda here, there: there.sum().item(),
        lambda here, there: there.tolist(),
        lambda here, there: bool(there[0] > 0),
        lambda here, there: there.cpu(),
        lambda here, there: there.nonzero(),
        lambda here, there: there[there > 0],
        lambda here, there: here.to(CARD),
        lambda here, there: there.copy_(here),
        lambda here, there: torch.tensor([1, 2], device=CARD),
    ],
)
def test_a_capture_may_not_wait_for_the_card_or_copy_to_it(calls, waits):
    here, there = torch.ones(2), torch.ones(2, device=CARD)
    waits(here, there)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        record(lambda: waits(here, there))
    waits(here, there)  # and afterwards it may


def test_the_kernel_refuses_what_the_card_s_kernel_refuses(calls):
    from torch.nn.attention import varlen

    def attend(dtype: torch.dtype, width: int, page: int) -> torch.Tensor:
        integers = [torch.tensor(one, dtype=torch.int32, device=CARD) for one in ([0, 1], [1], [[0]])]
        query, key = torch.ones(1, 2, width), torch.ones(2, page, 2, width)
        return varlen.varlen_attn(
            query.to(CARD, dtype), key.to(CARD, dtype), key.to(CARD, dtype), integers[0], None, 1, 1,
            window_size=(-1, 0), seqused_k=integers[1], block_table=integers[2],
        )  # fmt: skip

    assert attend(torch.bfloat16, 16, 256).shape == (1, 2, 16)
    for dtype, width, page in ((torch.float32, 16, 256), (torch.float16, 12, 256), (torch.bfloat16, 16, 64)):
        with pytest.raises(RuntimeError):
            attend(dtype, width, page)


def test_a_forward_is_traced_and_computed_on_the_card(calls):
    config = llama_config(hidden=64, intermediate=128, heads=4, kv_heads=2, blocks=2)
    model = choose_layout(make_random_span(config, dtype=torch.bfloat16, device=CARD), "contiguous")
    hidden = torch.randn(2, 1, 64).to(CARD, torch.bfloat16)
    flat = TracedForward(model.module, model.run_modules, hidden).flat(model.layers)
    traced = model.with_strategy(replace(model.strategy, forward="flat", traced=flat, flat=flat))
    inputs, layout = torch.randn(7, 64).to(CARD, torch.bfloat16), StepLayout((0, 0), (3, 4))
    found, expected = (SessionCache(one).step(inputs, layout) for one in (traced, model))
    assert found.device == CARD
    torch.testing.assert_close(found.cpu(), expected.cpu())
