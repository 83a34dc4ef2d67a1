"""Rotary frequencies that depend on the length of a text: each text gets its own, whatever else a server computes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests import zoo
from tests.slow import slow_except
from tests.swarms import run_client, run_swarm

ORIGINAL = 32
"""Tokens of a text from which on its frequencies are others."""

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.2],
    "long_factor": [1.5, 3.0, 7.0, 9.0],
    "original_max_position_embeddings": ORIGINAL,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # A text that grows beyond the length begins again.
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    # The tokens before keep their frequencies.
    "llama": ("llama", {"rope_parameters": LONGROPE}),
    # The frequencies change with every token.
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "max_position_embeddings": ORIGINAL,
        },
    ),
}
SHORT, CROSSING, LONG = 8, ORIGINAL - 6, 3 * ORIGINAL
TOKENS = 16


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, zoo.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


class Local:
    """transformers itself. Each text has a model that has seen no other: dynamic frequencies only grow."""

    def __init__(self, folder) -> None:
        self._folder = folder

    def new(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)

    def text(self, tokens: torch.Tensor, **options: Any) -> list[int]:
        return text(self.new(), tokens, **options)


def text(model: Any, tokens: torch.Tensor, **options: Any) -> list[int]:
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(tokens, **options)[0].tolist()


@pytest.mark.parametrize("name", slow_except(MODELS, "phi3"))
def test_texts_are_those_of_transformers(name, tmp_path):
    family, overrides = MODELS[name]
    zoo.make_model(family, **overrides).save_pretrained(tmp_path / "model")
    local = Local(tmp_path / "model")
    prompts = [prompt(length) for length in (SHORT, CROSSING, LONG)]
    expected = [local.text(one) for one in prompts]
    with run_swarm(tmp_path / "model", ["0:3", "3:6", "3:6"]) as swarm, run_client(swarm) as model:
        assert [text(model, one) for one in prompts] == expected

        # Beside long texts, whose steps a server computes in the same forward.
        with run_client(swarm) as other, other.inference_session(max_length=4 * LONG) as session:
            ended = threading.Event()

            def go_on() -> None:
                session.step(other.word_embeddings(prompt(LONG, 1)))
                while not ended.is_set() and session.position < 4 * LONG:
                    session.step(other.word_embeddings(prompt(1, 2)))

            beside = threading.Thread(target=go_on)
            beside.start()
            try:
                assert [text(model, one) for one in prompts] == expected
            finally:
                ended.set()
                beside.join()

        # One session goes on: what it keeps of a text must not be what another one has computed with.
        with model.inference_session(max_length=2 * LONG) as session:
            for tokens in (prompts[2], prompts[2][:, :SHORT], prompts[2][:, :CROSSING]):
                assert text(model, tokens) == local.text(tokens)

        # Candidates are computed as the tokens would be without.
        for one, known in zip(prompts, expected, strict=True):
            assert text(model, one.repeat(1, 1), prompt_lookup_num_tokens=4) == known

        # Rows of a batch grow beyond the length at different times.
        padded = torch.cat([torch.zeros(1, CROSSING - SHORT, dtype=torch.long), prompts[0]], 1)
        mask = torch.tensor([[0] * (CROSSING - SHORT) + [1] * SHORT, [1] * CROSSING])
        known = [local.text(one, max_new_tokens=ORIGINAL) for one in prompts[:2]]
        options = {"attention_mask": mask, "max_new_tokens": ORIGINAL, "do_sample": False, "eos_token_id": None}
        rows = model.generate(torch.cat([padded, prompts[1]]), pad_token_id=0, **options).tolist()
        assert [rows[0][CROSSING - SHORT :], rows[1]] == known

        # Whole texts of different lengths, without a session.
        rows = torch.cat([torch.cat([prompts[0], prompts[0][:, :1].expand(1, LONG - SHORT)], 1), prompts[2]])
        mask = torch.tensor([[1] * SHORT + [0] * (LONG - SHORT), [1] * LONG])
        with torch.no_grad():
            logits = model(rows, attention_mask=mask).logits
            for row, length in ((0, SHORT), (1, LONG)):
                wanted = local.new()(rows[row : row + 1, :length]).logits[0]
                torch.testing.assert_close(logits[row, :length], wanted, atol=2e-4, rtol=1e-4)

        # A server is lost: what was computed is replayed in other chunks.
        for one, known in zip(prompts[1:], expected[1:], strict=True):
            with model.inference_session(max_length=2 * LONG) as session:
                assert text(model, one, max_new_tokens=TOKENS // 2) == known[: one.shape[1] + TOKENS // 2]
                if len(swarm.holders("3:6")) > 1:
                    assert session.route is not None
                    swarm.server(session.route.hops[1].server.peer_id).kill()
                tokens = torch.tensor([known[: one.shape[1] + TOKENS // 2]])
                hidden = session.step(model.word_embeddings(tokens[:, session.position :]))
                assert int(model.lm_head(hidden)[0, -1].argmax()) == known[tokens.shape[1]]
