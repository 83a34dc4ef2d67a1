"""Every family over real servers: tokens and logits equal the local transformers model's.

The representatives over three servers, with tokens that leave early, too; and the servers' caches are then those of
plain generation, bit for bit. The others over one: what a cut does to a family is tried in one process, for all of them
(`tests/models/test_zoo_spans.py`), and this shows that the client holds the rest of it; families whose rest is that of
another one are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm import EarlyExit
from swarm.client.early_exit import exit_decoder
from tests.client.prompts import PAD, padded_batch
from tests.server_caches import largest_difference
from tests.slow import slow_except
from tests.swarms import run_client, run_swarm
from tests.zoo import FAMILIES, REPRESENTATIVES, make_checkpoint

SPANS = ("0:2", "2:3", "3:6")  # the second and third start in the middle of every pattern
NEW_TOKENS = 12
SAME_REST = {
    "olmo2", "hunyuan_v1_dense", "seed_oss", "phi3", "qwen3", "qwen3_moe", "opt_projected", "falcon_multi_query",
    "falcon_alibi", "deepseek_v2", "glm4_moe", "hunyuan_v1_moe",
}  # fmt: skip
"""What a client computes of these is, line by line, what it computes of another family of the zoo."""


@pytest.mark.parametrize("family", slow_except([one for one in FAMILIES if one not in SAME_REST], *REPRESENTATIVES))
def test_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_decoder, "MIN_GAIN", 0.0)  # look also at servers that are so near that it is not worth it
    folder = make_checkpoint(family, tmp_path)
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = padded_batch()
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD}
    expected = local.generate(**inputs, **settings)
    for row in expected[:, -NEW_TOKENS:]:
        assert row.unique().numel() >= 4, "text that does not vary proves nothing"
    with torch.no_grad():
        expected_logits = local(**inputs).logits

    ways = (None, EarlyExit(threshold=0.0, batch="all")) if family in REPRESENTATIVES else (None,)
    spans = SPANS if family in REPRESENTATIVES else ("0:6",)
    with run_swarm(folder, spans, dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        assert type(model).__name__ == type(local).__name__
        texts, caches = [], []
        for exits in ways:
            with model.inference_session(max_length=64) as session:
                texts.append(model.generate(**inputs, **settings, early_exit=exits).tolist())
                caches.append(swarm.caches(session))
        with torch.no_grad():
            logits = model(**inputs).logits

    assert texts == [expected.tolist()] * len(ways)
    assert largest_difference(caches[0], caches[-1]) == 0
    real = inputs["attention_mask"].bool()
    error = (logits - expected_logits)[real].abs().max() / expected_logits[real].abs().max()
    assert error <= 1e-4
