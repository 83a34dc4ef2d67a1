"""Every family's spans against its own whole model: what goes into the first block, and what comes out of the last."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm.data_structures import Span
from swarm.errors import UnsupportedModel
from swarm.models.attention.padded_kv import PaddedKV
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.cutting import cut_layers
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from tests import zoo

torch.set_num_threads(1)

SPANS = (Span(0, 2), Span(2, 3), Span(3, 6))
PADS = [len(zoo.PROMPTS[1]) - len(zoo.PROMPTS[0]), 0]
PREFILL = torch.tensor([[0] * PADS[0] + zoo.PROMPTS[0], zoo.PROMPTS[1]])
STEPS = torch.tensor([[11, 85, 42, 7], [63, 29, 110, 54]])
OTHER = torch.tensor([[71, 20], [9, 118]])
WHOLE = torch.cat([PREFILL, STEPS], dim=1)
ROLLBACK = 3


class Local:
    """The whole model in this process, with what enters its first block and leaves its last one."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        _, owner, name = cut_layers.find_layers(self.model.base_model, zoo.BLOCKS)
        layers = getattr(owner, name)
        layers[0].register_forward_pre_hook(self._note_input, with_kwargs=True)
        layers[-1].register_forward_hook(self._note_output)
        self._takes_positions = "position_ids" in inspect.signature(self.model.base_model.forward).parameters

    def _note_input(self, module, args, kwargs):
        self.entered = (args[0] if args else kwargs["hidden_states"]).clone()

    def _note_output(self, module, args, output):
        self.left = (output[0] if isinstance(output, tuple) else output).clone()

    @torch.inference_mode()
    def run(self, tokens_RT: torch.Tensor, past: Any = None, use_cache: bool = False) -> Any:
        """Compute `tokens_RT`, which follow what `past` holds; returns the model's own cache."""
        seen = past.get_seq_length() if past is not None else 0
        slots = torch.arange(seen + tokens_RT.shape[1])
        mask = (slots >= torch.tensor(PADS).unsqueeze(1)).long()
        arguments = {"attention_mask": mask, "past_key_values": past, "use_cache": use_cache}
        if self._takes_positions:
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, seen:]
        return self.model.base_model(tokens_RT, **arguments).past_key_values


@dataclass
class Chain:
    """The spans one behind the other, as a client's route would have them."""

    spans: list[SpanModel]
    pads: list[int] | None = None

    def new_caches(self) -> list[PaddedKV]:
        return [span.new_padded_kv() for span in self.spans]

    def run(self, hidden: torch.Tensor, caches: list[PaddedKV] | None = None) -> torch.Tensor:
        for number, span in enumerate(self.spans):
            hidden = span.forward(hidden, caches[number] if caches else None, self.pads)
        return hidden


def load(folder: Path, span: Span) -> SpanModel:
    return load_span(open_checkpoint(folder), span, dtype=torch.float32, device=torch.device("cpu"))


def assert_same(result: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> None:
    """Relative error of every real token at most 1e-4."""
    error = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error[real].max() <= 1e-4, error


def real_tokens(start: int, end: int) -> torch.Tensor:
    """Which of the slots [start, end) hold a token, for both rows."""
    return torch.arange(start, end) >= torch.tensor(PADS).unsqueeze(1)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_spans_compute_what_the_whole_model_does(family, tmp_path):
    """The one pass over all families; other tests take a few of them."""
    folder = zoo.make_checkpoint(family, tmp_path)
    local = Local(folder)
    zoo.assert_text_varies(local.model)
    chain = Chain([load(folder, span) for span in SPANS], PADS)  # each loaded by itself, as by three servers
    check_prefill_and_steps(local, chain)
    check_rollback(local, chain)
    check_without_cache(local, chain)
    if family != "llama4_text":  # it scales attention by the slot, in transformers too (in real models from 8192 on)
        check_a_padded_row(local, chain)
    whole = load(folder, Span(0, zoo.BLOCKS))
    check_prefill_and_steps(local, Chain([whole.narrowed(span) for span in SPANS], PADS))
    check_prefill_and_steps(local, Chain([whole], PADS))


def check_prefill_and_steps(local: Local, chain: Chain) -> None:
    caches = chain.new_caches()
    past, end = None, 0
    for tokens in (PREFILL, *STEPS.split(1, dim=1)):
        past = local.run(tokens, past, use_cache=True)
        start, end = end, end + tokens.shape[1]
        assert_same(chain.run(local.entered, caches), local.left, real_tokens(start, end))


def check_rollback(local: Local, chain: Chain) -> None:
    caches = chain.new_caches()
    local.run(WHOLE)
    chain.run(local.entered, caches)
    kept = WHOLE.shape[1] - ROLLBACK
    for cache in caches:
        cache.truncate(kept)
    # The family's own sliding caches cannot go back, so the local model computes the whole sequence again.
    local.run(torch.cat([WHOLE[:, :kept], OTHER], dim=1))
    result = chain.run(local.entered[:, kept:], caches)
    assert_same(result, local.left[:, kept:], real_tokens(kept, kept + OTHER.shape[1]))


def check_without_cache(local: Local, chain: Chain) -> None:
    local.run(WHOLE)
    received = local.entered.clone()
    assert_same(chain.run(local.entered), local.left, real_tokens(0, WHOLE.shape[1]))
    assert torch.equal(local.entered, received), "the caller's tensor was changed"


def check_a_padded_row(local: Local, chain: Chain) -> None:
    """It computes what it computes alone, so a server may put rows of different lengths into one rectangle."""
    local.run(WHOLE)
    alone = Chain(chain.spans, pads=None).run(local.entered[:1, PADS[0] :])
    together = chain.run(local.entered)[:1, PADS[0] :]
    assert_same(together, alone, torch.ones(alone.shape[:2], dtype=torch.bool))


REFUSED = [
    *("t5", "bart"),  # encoder and decoder
    *("bert", "roberta", "albert"),  # encoders
    *("rwkv", "xlstm"),  # recurrent
    *("zamba", "zamba2", "inkling_text", "inkling2_text", "qwen4_exp_text", "recurrent_gemma", "minimax", "zaya"),
    *("gemma3n_text", "gemma4_text", "hrm_text", "longcat_flash", "deepseek_v4"),  # not one cache entry a layer
    *("git", "mllama"),  # several models in one
]


def test_families_that_cannot_be_cut_are_refused_by_name_from_the_config_alone(tmp_path):
    for family in REFUSED:
        AutoConfig.for_model(family).save_pretrained(tmp_path / family)
        with pytest.raises(UnsupportedModel, match=f"'{family}'"):
            open_checkpoint(tmp_path / family)
