"""LoRA factors as torch parameters (Hu et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from swarm.client.tuning.lora_config import LoraSettings
from swarm.models.adapters.adapter_files import StoredAdapter, lora_scaling, scale_up
from swarm.models.adapters.block_adapter import LoraFactors


class LoraModule(nn.Module):
    """The LoRA of one linear module, which adds `scaling * lora_B @ lora_A`; float32.

    Args:
        down: A, `[rank, inputs]`.
        up: B, `[outputs, rank]`.
    """

    def __init__(self, down: torch.Tensor, up: torch.Tensor, alpha: float, use_rslora: bool) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(down.float())
        self.lora_B = nn.Parameter(up.float())
        self.alpha = alpha
        self.scaling = lora_scaling(self.rank, alpha, use_rslora)

    @property
    def rank(self) -> int:
        return len(self.lora_A)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}"


class Lora(nn.Module):
    """The LoRA of a whole model: `lora[3]["self_attn.q_proj"]` is a `LoraModule`.

    Args:
        modules: by block and module path inside it.
        use_rslora: whether `scaling` is that of rank-stabilized LoRA.
    """

    def __init__(self, modules: Mapping[int, Mapping[str, LoraModule]], use_rslora: bool) -> None:
        super().__init__()
        self.use_rslora = use_rslora
        self._by_block = {block: dict(sorted(modules[block].items())) for block in sorted(modules)}
        for block, inside in self._by_block.items():
            for module, factors in inside.items():
                self._register(f"{block}.{module}", factors)

    def __getitem__(self, block: int) -> Mapping[str, LoraModule]:
        return self._by_block.get(block, {})

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_block)

    def factors(self, block: int) -> tuple[LoraFactors, ...]:
        """The factors of a block as servers get them, scaled inside the graph."""
        return tuple(
            LoraFactors(module, one.lora_A, scale_up(one.lora_B, one.scaling)) for module, one in self[block].items()
        )

    def _register(self, path: str, factors: LoraModule) -> None:
        """Register a module under its path, so that its parameters have names like `lora.3.self_attn.q_proj.lora_A`."""
        owner: nn.Module = self
        *outer, last = path.split(".")
        for name in outer:
            if name not in owner._modules:
                owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(last, factors)


def new_lora(targets: Mapping[int, Mapping[str, tuple[int, int]]], settings: LoraSettings, path: str) -> Lora:
    """Untrained factors: A random and B zero, so that at first they change nothing.

    Args:
        targets: see `lora_config.select_targets`.
        path: path of the list of blocks in the model.
    """

    def new_module(block: int, module: str, sizes: tuple[int, int]) -> LoraModule:
        rank, alpha = settings.rank_and_alpha(f"{path}.{block}.{module}")
        down, up = torch.empty(rank, sizes[0]), torch.zeros(sizes[1], rank)
        if settings.initial == "gaussian":
            nn.init.normal_(down, std=1 / rank)
        else:
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        if settings.initial is False:
            nn.init.kaiming_uniform_(up, a=math.sqrt(5))
        return LoraModule(down, up, alpha, settings.use_rslora)

    modules = {
        block: {name: new_module(block, name, sizes) for name, sizes in inside.items()}
        for block, inside in targets.items()
    }
    return Lora(modules, settings.use_rslora)


def stored_lora(stored: StoredAdapter) -> Lora:
    """The factors of an adapter's files."""
    use_rslora = stored.config.use_rslora
    modules = {
        block: {name: LoraModule(one.down, one.up, one.alpha, use_rslora) for name, one in inside.items()}
        for block, inside in stored.lora.items()
    }
    return Lora(modules, use_rslora)
