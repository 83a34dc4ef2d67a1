"""Models that were trained for language: verified texts are the full model's, and lenses help them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm import EarlyExit
from swarm.client.early_exit import exit_decoder
from swarm.client.routes.events import ExitTaken
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.swarms import run_client, run_swarm
from tests.waiting import wait_until

STORIES = Path(__file__).resolve().parents[5] / "shared" / "models" / "stories260K-hf"
"""A model of short stories with five blocks. It lies beside the checkout on machines that have it."""

NEW = 48
BEGINNINGS = ("Once upon a time, there was a little girl", "Tom had a big red ball. One day", "The king")

has_stories = pytest.mark.skipif(not STORIES.is_dir(), reason=f"stories260K-hf is not in {STORIES.parent}")
MODELS = {"stories260K": (STORIES, ("0:2", "2:4", "4:5")), "demo": (DEMO_FOLDER, ("0:4", "4:8", "8:12"))}


@pytest.fixture(
    scope="module",
    params=[pytest.param("stories260K", marks=has_stories), pytest.param("demo", marks=pytest.mark.slow)],
)
def folder_and_client(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any]]:
    folder, spans = MODELS[request.param]
    with run_swarm(folder, spans, dtype="float32") as swarm, run_client(swarm, dtype="float32") as client:
        yield folder, client


@pytest.fixture(scope="module")
def folder(folder_and_client: tuple[Path, Any]) -> Path:
    return folder_and_client[0]


@pytest.fixture(scope="module")
def local(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def model(folder_and_client: tuple[Path, Any], monkeypatch) -> Any:
    """A client of three servers that looks at all of them, however near they are, without lenses."""
    monkeypatch.setattr(exit_decoder, "MIN_GAIN", 0.0)
    client = folder_and_client[1]
    client.exits = None
    return client


def prompts(folder: Path) -> dict[str, torch.Tensor]:
    tokenizer = load_tokenizer(folder)
    rows = [tokenizer(text)["input_ids"] for text in BEGINNINGS]
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


def greedy(model: Any, inputs: dict[str, torch.Tensor], **more: Any) -> list[list[int]]:
    texts: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **more)
    return texts.tolist()  # type: ignore[no-any-return]


def alone(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One prompt of a batch, without padding."""
    pad = int((inputs["attention_mask"][row] == 0).sum())
    return {name: tensor[row : row + 1, pad:] for name, tensor in inputs.items()}


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_greedy_texts_are_those_of_the_full_model(model, local, folder, threshold):
    inputs = alone(prompts(folder), 0)
    expected, exits = greedy(local, inputs), []

    def text_with_exits() -> bool:
        """Whether tokens left. Where this process is slow, answers may come before it can look."""
        with model.inference_session(max_length=128, listener=exits.append):
            assert greedy(model, inputs, early_exit=EarlyExit(threshold=threshold)) == expected
        return any(isinstance(one, ExitTaken) for one in exits)

    wait_until(text_with_exits)


@pytest.mark.parametrize(("batch", "threshold"), [("row", 0.3), ("all", 0.0)])
def test_padded_batches(model, local, folder, batch, threshold):
    inputs = prompts(folder)
    exits = EarlyExit(threshold=threshold, batch=batch)
    assert greedy(model, inputs, early_exit=exits) == greedy(local, inputs)


def written(local: Any, sequences: int, length: int) -> torch.Tensor:
    """Texts of the model itself, `[sequences, length]`: what it meets when it generates."""
    start = torch.full((sequences, 1), local.config.bos_token_id or 0)
    torch.manual_seed(0)
    texts: torch.Tensor = local.generate(
        start, do_sample=True, min_new_tokens=length, max_new_tokens=length, pad_token_id=0
    )
    return texts[:, 1:]


def test_lenses_bring_every_boundary_nearer_to_the_full_model(model, local, folder):
    """On held-out sequences, with nothing of the model itself changed."""
    inputs = prompts(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    boundaries = range(1, model.swarm.blocks)
    quality = model.train_exits([written(local, 24, 256)], boundaries=boundaries)
    assert [one.block for one in quality] == list(boundaries)
    for one in quality:
        # The demo model was trained for exits; a lens that does not help there is not kept.
        assert one.after > one.before or (folder == DEMO_FOLDER and one.after == one.before)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    for threshold in (0.0, 0.3):
        assert greedy(model, inputs, early_exit=EarlyExit(threshold=threshold)) == greedy(local, inputs)
