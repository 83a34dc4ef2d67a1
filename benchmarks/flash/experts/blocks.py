"""Blocks of a mixture of experts in the shapes of Qwen3-30B-A3B, random weights: experts on flash, or through mmap.

Routing is planted: routers compute their products, and then the experts that a trained small mixture chose for real
texts (`trace.npz`, of as many experts a block and a token) take the place of those that they would choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeRotaryEmbedding

from benchmarks.flash.experts.routing_trace import Trace
from benchmarks.flash.files import SCALE, write_random
from swarm.models.flash.block_plan import BlockPlan, FlashBlock, take_out
from swarm.models.flash.experts.attach import attach
from swarm.models.flash.experts.expert_pool import ExpertPool
from swarm.models.flash.experts.expert_site import EXPERTS, find_experts
from swarm.models.flash.records import RecordBuffer, RecordLayout, WeightStore
from swarm.models.weights.frozen_linear import prepack


@dataclass(frozen=True)
class MoeShape:
    """Sizes of a block."""

    hidden: int = 2048
    experts: int = 128
    intermediate: int = 768
    experts_a_token: int = 8
    heads: int = 32
    key_heads: int = 4
    head: int = 128

    @property
    def config(self) -> Qwen3MoeConfig:
        config = Qwen3MoeConfig(
            hidden_size=self.hidden,
            num_experts=self.experts,
            moe_intermediate_size=self.intermediate,
            num_experts_per_tok=self.experts_a_token,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head,
            norm_topk_prob=True,
            attn_implementation="sdpa",
            experts_implementation="eager",
        )
        config.layer_types = ["full_attention"] * 64
        return config

    @property
    def resident_values(self) -> int:
        """Weights of a block that are not experts."""
        attention = 2 * self.hidden * self.head * (self.heads + self.key_heads)
        return attention + self.hidden * self.experts


QWEN3 = MoeShape()


class TracedRouter(nn.Module):
    """A router whose scores are computed, and whose choice is planted.

    Args:
        router: the family's own.
        trace_TK: the experts of one token after the other.
    """

    def __init__(self, router: nn.Module, trace_TK: np.ndarray) -> None:
        super().__init__()
        self.router = router
        self._trace_TK = torch.from_numpy(trace_TK)
        self._token = 0

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, scores, chosen_TK = self.router(hidden)
        first, self._token = self._token, self._token + len(chosen_TK)
        return logits, scores, self._trace_TK[first : self._token]


class MoeBlocks:
    """The blocks of a span.

    Args:
        trace_TBK: the experts of its tokens.

    Attributes:
        blocks: in order.
        plan: by which the experts are cut.
    """

    def __init__(self, shape: MoeShape, trace_TBK: Trace, dtype: torch.dtype) -> None:
        config = shape.config
        self._rotary = Qwen3MoeRotaryEmbedding(config)
        self.blocks: list[nn.Module] = []
        self.taken: list[dict[str, nn.Module]] = []
        with torch.device("meta"):
            empty = Qwen3MoeDecoderLayer(config, 0).to(dtype).eval()
        plan = find_experts(empty)
        assert plan is not None
        self.plan: BlockPlan = plan
        self.layout = plan.layout({name: tuple(empty.get_parameter(name).shape) for name in plan.axes}, dtype)
        for number in range(trace_TBK.shape[1]):
            with torch.device("meta"):
                block = Qwen3MoeDecoderLayer(config, number).to(dtype).eval().requires_grad_(False)
            self.taken.append(take_out(block, plan))
            _fill(block, number, dtype)
            prepack(block)
            mixture: Any = block.mlp
            mixture.gate = TracedRouter(mixture.gate, trace_TBK[:, number])
            self.blocks.append(block)

    def put_experts(self, modules: Sequence[nn.Module]) -> None:
        """Put experts into the blocks."""
        for block, module in zip(self.blocks, modules, strict=True):
            block.set_submodule(self.plan.modules[EXPERTS], module)

    def attach_flash(self, stores: Sequence[WeightStore], budget: int) -> ExpertPool:
        """Have the blocks read their experts from stores."""
        found = [
            FlashBlock(block, self.plan, taken, {}, store)
            for block, taken, store in zip(self.blocks, self.taken, stores, strict=True)
        ]
        (pool,) = attach(found, budget)
        return pool

    def attach_mapped(self, paths: Sequence[Path]) -> None:
        """Have the blocks compute with experts in files that are mapped into memory."""
        for taken, path in zip(self.taken, paths, strict=True):
            memory = torch.from_file(str(path), shared=False, size=self.layout.file_bytes, dtype=torch.uint8)
            buffer = RecordBuffer(self.layout, self.layout.count, memory)
            for name in self.plan.axes:
                own = name.rpartition(".")[2]
                taken[EXPERTS]._parameters[own] = nn.Parameter(buffer.field(name), requires_grad=False)
        self.put_experts([taken[EXPERTS] for taken in self.taken])

    def token(self, hidden: torch.Tensor, cache: Any, position: int) -> torch.Tensor:
        """One token through all blocks, `[1, 1, hidden]`."""
        embeddings = self._rotary(hidden, torch.tensor([[position]]))
        for block in self.blocks:
            hidden = block(hidden, past_key_values=cache, position_embeddings=embeddings)
        return hidden


def write_files(folder: Path, layout: RecordLayout, count: int) -> list[Path]:
    """Write the experts of `count` blocks, unless they are there."""
    paths = [folder / f"{number}-experts-{layout.dtype.itemsize}.bin" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            write_random(path, layout, seed=number)
    return paths


def _fill(block: nn.Module, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(block.named_parameters()):
        values = torch.ones(parameter.shape)
        if parameter.ndim > 1:
            values = torch.randn(parameter.shape, generator=generator) * SCALE
        path, _, own = name.rpartition(".")
        block.get_submodule(path)._parameters[own] = nn.Parameter(values.to(dtype), requires_grad=False)
