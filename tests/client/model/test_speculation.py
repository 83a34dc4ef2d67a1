"""Speculative decoding over real servers: the tokens are those of plain greedy decoding, in fewer steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList

from swarm.client.chain.chain import Chain
from swarm.client.model.generation_mixin import bound_candidates, unseen_length, validate_speculation
from swarm.data_structures import StepLayout
from swarm.errors import UsageError
from tests.client.conftest import SPANS
from tests.client.prompts import prompt
from tests.disturbances import Before, holder
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.zoo import BLOCKS

NEW = 24
LOOKUP = {"prompt_lookup_num_tokens": 4}


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    """Each span twice."""
    with run_swarm(folder, SPANS * 2, dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm, dtype="float32", wire="none") as model:
        yield model


def load(folder: Path, blocks: int) -> Any:
    """The model's own first blocks, as a draft."""
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = blocks
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@pytest.fixture(scope="module")
def local(folder: Path) -> Any:
    return load(folder, BLOCKS)


@pytest.fixture(scope="module")
def perfect(folder: Path) -> dict[str, Any]:
    """A draft whose candidates are all right."""
    return {"assistant_model": load(folder, BLOCKS)}


@pytest.fixture(scope="module")
def poor(folder: Path) -> dict[str, Any]:
    """A draft most of whose candidates are rejected."""
    return {"assistant_model": load(folder, 1)}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[StepLayout]:
    """What the swarm is asked to compute."""
    found: list[StepLayout] = []
    real = Chain.steps

    async def counted(self: Chain, parts: Any) -> Any:
        found.extend(layout for _, layout in parts)
        return await real(self, parts)

    monkeypatch.setattr(Chain, "steps", counted)
    return found


def write(model: Any, tokens: torch.Tensor, new: int = NEW, **more: Any) -> list[int]:
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new, "min_new_tokens": new, **more}
    return model.generate(tokens, **settings)[0].tolist()  # type: ignore[no-any-return]


def test_right_candidates_are_taken_in_one_step(
    model: Any, local: Any, perfect: dict[str, Any], steps: list[StepLayout]
) -> None:
    assert write(model, prompt(), **perfect) == write(local, prompt())
    # Each step brings five candidates and the token before; the first brings the prompt as well.
    assert len(steps) == NEW // 6
    assert [layout.tokens for layout in steps[:2]] == [7 + 5, 6]
    assert all(before.starts[0] + before.tokens == after.starts[0] for before, after in itertools.pairwise(steps))


def test_wrong_candidates_are_rolled_back(
    model: Any, local: Any, poor: dict[str, Any], steps: list[StepLayout]
) -> None:
    assert write(model, prompt(), **poor) == write(local, prompt())
    assert len(steps) <= NEW
    back = [before.starts[0] + before.tokens - after.starts[0] for before, after in itertools.pairwise(steps)]
    assert max(back) > 0


def test_prompt_lookup(model: Any, local: Any, steps: list[StepLayout]) -> None:
    tokens = torch.cat([torch.tensor([write(local, prompt())])] * 2, dim=1)  # it may go on as it did before
    assert write(model, tokens, **LOOKUP) == write(local, tokens)
    tried = [layout.tokens for layout in steps if layout.starts[0] >= tokens.shape[1]]
    assert max(tried) == 5
    assert len(tried) < NEW


@pytest.mark.parametrize("how", ["by turns"])
def test_a_session_goes_on_over_several_calls(
    model: Any, local: Any, perfect: dict[str, Any], poor: dict[str, Any], how: str, steps: list[StepLayout]
) -> None:
    drafts = {"perfect": [perfect], "poor": [poor], "lookup": [LOOKUP], "by turns": [poor, {}, LOOKUP, perfect]}[how]
    with model.inference_session(max_length=100) as session:
        text = prompt()
        for number in range(4):
            written = write(model, text, 8, **drafts[number % len(drafts)])
            assert written == write(local, text, 8)
            assert session.position == len(written) - 1
            text = torch.cat([torch.tensor([written]), prompt(3, seed=number)], dim=1)
        # Nothing was computed that a session had computed before.
        begun = [layout.starts[0] for layout in steps]
        assert begun.count(0) == 1
        # Another text shares only its beginning.
        other = torch.cat([text[:, :5], prompt(4, seed=9)], dim=1)
        assert write(model, other, 8, **drafts[0]) == write(local, other, 8)


@pytest.mark.parametrize("how", ["perfect", "lookup"])
def test_candidates_need_no_room_beyond_the_end_of_the_text(
    model: Any, local: Any, perfect: dict[str, Any], poor: dict[str, Any], how: str
) -> None:
    draft = {"perfect": perfect, "poor": poor, "lookup": {"prompt_lookup_num_tokens": 100}}[how]
    limit = model.config.max_position_embeddings
    repeated = write(local, prompt(), 40)[-10:] * 30
    tokens = torch.tensor([repeated[: limit - NEW]])
    expected = write(local, tokens, limit - tokens.shape[1])
    with model.inference_session(max_length=limit - 1):  # the last token is never computed
        assert write(model, tokens, limit - tokens.shape[1], **draft) == expected
    assert write(model, tokens, limit - tokens.shape[1], **draft) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("block", "how"), [(0, "perfect"), (5, "poor")])
def test_a_server_is_killed_meanwhile(
    swarm: TestSwarm, local: Any, perfect: dict[str, Any], poor: dict[str, Any], block: int, how: str
) -> None:
    fresh = [swarm.start(blocks, dtype="float32") for blocks in SPANS for _ in range(2 - len(swarm.holders(blocks)))]
    for server in fresh:
        server.wait_ready()
    killed = []

    def kill(session: Any) -> None:
        killed.append(holder(swarm, session, block))
        killed[-1].kill()

    with run_client(swarm, dtype="float32", wire="none") as model, model.inference_session(max_length=64) as session:
        before = StoppingCriteriaList([Before(session, {3: kill})])
        draft = perfect if how == "perfect" else poor
        assert write(model, prompt(), stopping_criteria=before, **draft) == write(local, prompt())
        longer = torch.tensor([write(local, prompt(), 30)])
        assert write(model, longer, 10, **draft) == write(local, longer, 10)
    assert len(killed) == 1


def test_sampling(model: Any, local: Any, poor: dict[str, Any]) -> None:
    texts = []
    for candidate in (local, model):
        torch.manual_seed(5)
        texts.append(write(candidate, prompt(), do_sample=True, top_k=30, **poor))
    assert texts[0] == texts[1]


def test_drafts_from_remote_blocks_are_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="first blocks of the model, which are not at this client"):
        write(model, prompt(), assistant_early_exit=2)
    with pytest.raises(UsageError, match="assistant_model has to run at this client"):
        write(model, prompt(), assistant_model=model)
    assert len(write(model, prompt(), 3)) == 10


class Proposes:
    """A candidate generator that proposes a fixed text."""

    def __init__(self, length: int, logits: bool, looks_inside: bool = False) -> None:
        self.requires_model_outputs = looks_inside
        self._length = length
        self._logits = logits

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = torch.cat([input_ids, torch.arange(self._length)[None]], dim=1)
        return tokens, torch.rand(1, self._length, 9) if self._logits else None


def test_candidates_are_bounded() -> None:
    for logits in [True, False]:
        for length, limit, left in [(5, 20, 5), (5, 12, 2), (5, 10, 0), (5, 3, 0), (0, 20, 0)]:
            tokens, scores = bound_candidates(Proposes(length, logits), limit).get_candidates(prompt(10))
            assert tokens[:, :10].tolist() == prompt(10).tolist()
            assert tokens[0, 10:].tolist() == list(range(left))
            assert (scores.shape[1] == left) if logits else scores is None


def test_candidates_do_not_change_rotary_frequencies() -> None:
    for rope_limit, is_dynamic, left in [(12, False, 2), (9, False, 5), (9, True, 0), (30, True, 5)]:
        tokens, _ = bound_candidates(Proposes(5, False), 20, rope_limit, is_dynamic).get_candidates(prompt(10))
        assert tokens.shape[1] == 10 + left


def test_generators_that_look_inside_of_the_model_are_refused() -> None:
    with pytest.raises(UsageError, match="Proposes drafts from hidden states"):
        bound_candidates(Proposes(3, True, looks_inside=True), 10)
    with pytest.raises(UsageError, match="assistant_early_exit"):
        validate_speculation(SimpleNamespace(assistant_early_exit=1), is_draft_remote=False)


def test_unseen_length() -> None:
    for cached, given, mask, unseen in [
        (0, 5, 5, None),
        (3, 5, 5, 2),
        (3, 5, None, 2),
        (3, 5, 8, None),
        (5, 5, 5, None),
        (9, 5, 5, None),
    ]:
        assert unseen_length(cached, given, mask) == unseen
