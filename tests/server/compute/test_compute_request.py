"""What is computed, and where: nothing touches the device before the compute thread decodes."""

from __future__ import annotations

from typing import Any

import torch

from swarm.data_structures import StepLayout, WireFormat
from swarm.protocol.compression import encode_tensor
from swarm.server.compute.compute_request import merged_work

HIDDEN = 4


class Model:
    """Counts who asks for its device."""

    hidden_size = HIDDEN

    def __init__(self) -> None:
        self.asked = 0

    @property
    def device(self) -> torch.device:
        self.asked += 1
        return torch.device("cpu")


class Cache:
    def __init__(self, model: Model) -> None:
        self.model = model


def test_the_network_loop_copies_nothing_to_the_device():
    """Building a request runs there, and a copy would wait for all that the device was asked to compute before."""
    model = Model()
    cache: Any = Cache(model)
    steps = torch.randn(2, 3, HIDDEN)
    layout = StepLayout((0, 0, 0), (2, 2, 2))
    rows = [[0, 2, 4], [1, 3, 5]]
    payloads = [encode_tensor(step, WireFormat.NONE) for step in steps]
    arguments = "peer", b"session", cache, layout, payloads, rows, WireFormat.NONE, "float32", WireFormat.NONE
    work = merged_work(*arguments, urgent=False)
    assert model.asked == 0
    inputs = work.decode()
    assert torch.equal(inputs, steps.transpose(0, 1).reshape(6, HIDDEN))
    outputs = torch.frombuffer(bytearray(work.encode(inputs)), dtype=torch.float32)
    assert torch.equal(outputs.view(2, 3, HIDDEN), steps)
