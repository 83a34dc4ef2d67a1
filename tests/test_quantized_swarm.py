"""Servers of several precisions in one swarm: what they announce, and clients that ask for one."""

from __future__ import annotations

import pytest
import torch

from swarm.data_structures import Span, StepLayout
from swarm.errors import InvalidOption
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.session_cache import SessionCache
from swarm.models.loading.span_loading import load_span
from swarm.models.weights.quantization import INT4, INT8, NF4, form_for_device
from swarm.server.memory_budget import resolve_device
from tests.swarms import TestSwarm, run_client, run_swarm

PROMPT = torch.tensor([[5, 33, 101, 77, 12, 58, 99, 41, 8]])
BLOCKS = 12
DEVICE = resolve_device("auto")
FOUR_BITS = form_for_device(DEVICE, NF4)
"""What servers on this machine hold: nf4 on a CPU is int4, and says so."""
OTHER = NF4 if FOUR_BITS == INT4 else INT4


@pytest.fixture(scope="module")
def swarm():
    with run_swarm("swarm/models/demo", ("0:12",), quant="int8") as found:
        found.start("0:12", quant="nf4").wait_ready()
        yield found


def precisions(swarm: TestSwarm, **options) -> list[str]:
    with run_client(swarm, **options) as model:
        return sorted(server.quantization for server in model.swarm.servers())


def test_servers_announce_what_they_hold_and_clients_choose(swarm):
    assert precisions(swarm) == sorted([FOUR_BITS, INT8])
    assert precisions(swarm, quant=INT8) == [INT8]
    assert precisions(swarm, quant=[INT8, FOUR_BITS]) == sorted([FOUR_BITS, INT8])
    assert precisions(swarm, quant=[OTHER, "none"]) == []


@pytest.mark.parametrize("form", [INT8, FOUR_BITS])
def test_text_of_quantized_servers(swarm, form):
    """The client gets what the quantized blocks compute in this process."""
    span = load_span(open_checkpoint(), Span(0, BLOCKS), dtype=torch.float32, device=DEVICE, quant=form)
    with run_client(swarm, quant=form) as model, model.inference_session(max_length=32) as session:
        hidden = torch.randn(1, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        came = session.step(hidden)
        assert model.generate(PROMPT, max_new_tokens=8, do_sample=False).shape == (1, 17)
        expected = model.model.norm(SessionCache(span).step(hidden[0].to(DEVICE), StepLayout((0,), (9,))).cpu())
    assert (came[0] - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("quant", ["int3", [], ["int8", "something"]])
def test_a_precision_that_does_not_exist(swarm, quant):
    with pytest.raises(InvalidOption, match="int4, int8, nf4, none"):
        swarm.client(quant=quant)
