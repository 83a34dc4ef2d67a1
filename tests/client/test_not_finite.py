"""What clients and owners of servers learn where servers make NaN or infinity of finite values."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swarm.errors import NotFiniteOutputs
from tests import zoo
from tests.swarms import run_client, run_swarm
from tests.waiting import wait_until

PROMPT = torch.tensor([zoo.PROMPTS[0]])
PATIENCE_S = 600.0
"""For blocks that nobody holds. No test is so patient."""


def save_changed(folder: Path, block: int, change: Callable[[torch.Tensor], object]) -> Path:
    """A model with other weights in the middle of a block."""
    model = zoo.make_model("llama")
    change(model.model.layers[block].mlp.down_proj.weight.data)
    model.save_pretrained(folder)
    return folder


def warnings(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "computed NaN or infinity" in line]


@pytest.mark.parametrize("wire", ["none", "blockwise8"])
def test_damaged_weights_are_named_soon_by_client_and_server(tmp_path: Path, wire: str) -> None:
    """Behind another server, which may be at fault as well; both servers of the blocks have the damaged weights."""
    folder, log = save_changed(tmp_path / "model", 4, lambda weight: weight[3, 5:6].fill_(torch.nan)), tmp_path / "log"
    with run_swarm(folder, ["0:3"]) as swarm:
        for server in [swarm.start("3:6", log=log), swarm.start("3:6")]:
            server.wait_ready()
        with run_client(swarm, wire=wire, wait_for_blocks=PATIENCE_S) as model:
            began = time.monotonic()
            with pytest.raises(NotFiniteOutputs, match=r"\(blocks 3:6\) computed NaN or infinity in float32.*damaged"):
                model.generate(PROMPT, max_new_tokens=4)
            assert time.monotonic() - began < PATIENCE_S / 10
        wait_until(lambda: warnings(log))
        assert len(warnings(log)) == 1
        assert "Block 4 computed NaN or infinity in float32" in warnings(log)[0]


def test_what_float16_cannot_hold_is_computed_by_another_server(tmp_path: Path) -> None:
    folder, log = save_changed(tmp_path / "model", 1, lambda weight: weight.mul_(1e6)), tmp_path / "log"
    with run_swarm(folder, ["0:6"], dtype="bfloat16") as swarm:
        with run_client(swarm, dtype="bfloat16") as model:
            expected = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
        narrow = swarm.start("0:6", log=log, dtype="float16", throughput=1e5).wait_ready()
        with run_client(swarm, dtype="bfloat16", wait_for_blocks=PATIENCE_S) as model:
            assert torch.equal(model.generate(PROMPT, max_new_tokens=4, do_sample=False), expected)
            wait_until(lambda: warnings(log))
            assert "Block 1 computed NaN or infinity in float16" in warnings(log)[0]
            assert "--dtype bfloat16" in warnings(log)[0]
        only = {"allowed_servers": [narrow.peer_id], "dtype": "bfloat16", "wait_for_blocks": PATIENCE_S}
        with (
            run_client(swarm, **only) as model,
            pytest.raises(NotFiniteOutputs, match=r"in float16.*--dtype bfloat16"),
        ):
            model.generate(PROMPT, max_new_tokens=4)
