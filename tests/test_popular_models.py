"""The models that people run most: each is served as transformers computes it, or refused in words from its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.data_structures import StepLayout
from swarm.errors import UnsupportedModel
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.session_cache import SessionCache, advance_steps
from tests import popular_models, zoo
from tests.models.test_wrappers import Chain, Mixin
from tests.popular_models import MODELS, Popular

torch.set_num_threads(1)

PROMPT = torch.tensor([zoo.PROMPTS[1]])
SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


class SessionChain(Chain):
    """The blocks in three spans, each of which continues a session with the tokens that are new."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sessions = [SessionCache(span) for span in self._spans]
        self._outputs_so_far = torch.empty(0, self._spans[0].hidden_size)

    def forward(self, hidden_states: torch.Tensor, *args: object, **more: object) -> Any:
        past = len(self._outputs_so_far)
        new = hidden_states[0, past:]
        for session in self._sessions:
            step = session.start_step(new, StepLayout((past,), (len(new),)))
            while step.tokens_left:
                advance_steps([(step, step.tokens_left)])
            step.commit()
            new = step.output
        self._outputs_so_far = torch.cat([self._outputs_so_far, new])
        result = self._outputs_so_far.unsqueeze(0)
        return (result, *[None] * (self._outputs - 1)) if self._outputs else result


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_texts_are_those_of_transformers(model: Popular, tmp_path):
    local = popular_models.save(model, tmp_path / "model")
    if local is None:
        with pytest.raises(UnsupportedModel, match=model.refused):
            open_checkpoint(tmp_path / "model")
        return
    checkpoint = open_checkpoint(tmp_path / "model")
    served = load_blockless_model(checkpoint, SessionChain(tmp_path / "model"), Mixin, dtype=torch.float32).model.eval()
    expected = local.generate(PROMPT, **SETTINGS)[0].tolist()
    assert len(set(expected[-8:])) >= 3, "text that does not vary proves nothing"
    assert served.generate(PROMPT, use_cache=False, **SETTINGS)[0].tolist() == expected


def test_at_least_42_of_50_are_served():
    assert len(MODELS) == len({model.name for model in MODELS}) == 50
    assert sum(not model.refused for model in MODELS) >= 42
