"""The three confidences inside real servers' spans, with lenses and classifiers that were trained over the swarm.

Where a token leaves must not depend on how the model is divided: three servers write what one server writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm import EarlyExit
from swarm.client.routes.events import ExitTaken
from swarm.server.config import ExitsOption
from tests.client.prompts import NEW, greedy
from tests.swarms import run_client, run_swarm
from tests.zoo import BLOCKS, PROMPTS

SPANS = ("0:3", "3:5", "5:6")

THRESHOLDS: dict[Any, dict[int, float]] = {
    "softmax": {1: 0.2, 2: 0.15, 3: 0.1, 4: 0.08, 5: 0.05},
    # Behind a span this client would compare with the span's beginning, and a server with the block before.
    "similarity": {1: 0.5, 2: 0.62, 4: 0.85},
    "classifier": {2: 0.33, 3: 0.36, 4: 0.45},
}


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lenses and classifiers for all blocks."""
    target = tmp_path_factory.mktemp("exits")
    text = torch.randint(3, 128, (1, 4000), generator=torch.Generator().manual_seed(0))
    with run_swarm(folder, ("0:6",), dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        for kind in ("lens", "classifier"):
            model.train_exits([text], boundaries=range(1, BLOCKS), kind=kind)
        model.save_exits(target)
    return target


def models(folder: Path, trained: Path, spans: tuple[str, ...]) -> Iterator[Any]:
    options: dict[str, Any] = {"dtype": "float32", "exits": ExitsOption(), "exits_from": trained}
    with run_swarm(folder, spans, **options) as swarm, run_client(swarm, dtype="float32", wire="none") as model:
        model.load_exits(trained)
        yield model


@pytest.fixture(scope="module")
def one(folder: Path, trained: Path) -> Iterator[Any]:
    yield from models(folder, trained, ("0:6",))


@pytest.fixture(scope="module")
def three(folder: Path, trained: Path) -> Iterator[Any]:
    yield from models(folder, trained, SPANS)


def write(model: Any, options: EarlyExit | None) -> tuple[list[list[int]], Counter[int]]:
    """The texts behind all prompts, greedily, and the tokens that left, by block."""
    left: Counter[int] = Counter()

    def count(event: Any) -> None:
        if isinstance(event, ExitTaken):
            left[event.block] += 1

    texts = []
    for row in PROMPTS:
        with model.inference_session(max_length=64, listener=count):
            found = greedy(model, torch.tensor([row]), early_exit=options)
        texts.append(found[0, len(row) :].tolist())
    return texts, left


@pytest.mark.slow
@pytest.mark.parametrize("confidence", THRESHOLDS)
def test_three_servers_write_what_one_server_writes(one, three, confidence):
    options = EarlyExit(confidence, THRESHOLDS[confidence], verify=False, fill="project")
    texts, left = write(three, options)
    assert len(left) > 1, "tokens leave here and there"
    assert sum(left.values()) < (NEW - 1) * len(PROMPTS), "and some pass all blocks"
    assert (texts, left) == write(one, options)
