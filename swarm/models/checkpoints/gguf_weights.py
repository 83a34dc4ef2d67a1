"""The weights of GGUF files, under the names and in the form that the family of transformers gives them.

A tensor is unpacked when it is read, a piece at a time. transformers unpacks most types, and undoes what the converter
of llama.cpp did to some families; the other families are described here in the same terms.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf import GGUF_ARCHS, get_gguf_conversion_mapping
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
from transformers.integrations.gguf.gguf_conversion_mapping import DENSE_DECODER_RENAMINGS

from swarm.common.files.gguf_header import ARCHITECTURE, GgufHeader, GgufTensor, read_header, split_files
from swarm.errors import CheckpointError, UnsupportedModel
from swarm.models.checkpoints.config_limits import MAX_ENTRIES, MAX_WIDTH
from swarm.models.checkpoints.gguf_config import ARCHITECTURES, described_config
from swarm.models.cutting import families
from swarm.models.weights.packed import FP4_VALUES

PIECE_VALUES = 1 << 20
"""About so many values are unpacked at a time, in float32."""

Q5_0, Q5_1, MXFP4 = 6, 7, 39
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_BLOCKS = {**{kind: (1, dtype.itemsize) for kind, dtype in _PLAIN.items()}, **GGML_BLOCK}
_BLOCKS |= {Q5_0: (32, 22), Q5_1: (32, 24), MXFP4: (32, 17)}
"""For each type that is read, how many values are packed together, and in how many bytes."""

_FP4 = torch.tensor(FP4_VALUES)
_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of which the config says the same."""


@dataclass(frozen=True)
class GgufFiles:
    """The files of one model, in order. Made by `open_files`, which checks that they hold what their headers say."""

    paths: tuple[Path, ...]
    headers: tuple[GgufHeader, ...]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.headers[0].metadata

    @property
    def architecture(self) -> str:
        return str(self.metadata[ARCHITECTURE])

    @cached_property
    def tensors(self) -> dict[str, GgufTensor]:
        """By GGUF's names."""
        return {name: one for header in self.headers for name, one in header.tensors.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in where no config names one."""
        kinds = {one.type for one in self.tensors.values()}
        if kinds <= {0}:
            return torch.float32
        return torch.float16 if kinds <= {0, 1} else torch.bfloat16

    def config(self) -> dict[str, Any]:
        """What `config.json` would say. Raises anything if the files are malformed."""
        return described_config(self.metadata, self.tensors, self._numbers)

    def _numbers(self, name: str) -> list[float]:
        if math.prod(self.tensors[name].shape) > MAX_ENTRIES:
            raise ValueError(f"{name} has the shape {list(self.tensors[name].shape)}")
        numbers: list[float] = self.dense(name, torch.float32).flatten().tolist()
        return numbers

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor, by GGUF's name."""
        return next(path for path, one in zip(self.paths, self.headers, strict=True) if name in one.tensors)

    def stored(self, name: str) -> torch.Tensor:
        """A tensor's bytes, in rows, as they are in the file: a view of it, which must not be written to."""
        one = self.tensors[name]
        values, size = _BLOCKS[one.type]
        shape = (math.prod(one.shape[:-1]), one.shape[-1] // values * size)
        try:
            data = np.memmap(self.path_of(name), np.uint8, "r", one.offset, shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path_of(name).name} cannot be read: {error}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no tensors that cannot be written to
            return torch.from_numpy(data)

    def dense(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor's values: in `dtype` if they are packed, else as they are stored."""
        one, rows = self.tensors[name], self.stored(name)
        if one.type in _PLAIN:
            return rows.clone().view(_PLAIN[one.type]).view(one.shape)
        dense = torch.empty(len(rows), one.shape[-1], dtype=dtype)
        step = max(1, PIECE_VALUES // one.shape[-1])
        for start in range(0, len(rows), step):
            piece = rows[start : start + step].clone()
            dense[start : start + step] = _unpacked(piece, one.type).view(len(piece), -1)
        return dense.view(one.shape)


def open_files(path: Path) -> GgufFiles:
    """The model of which `path` is a file, and its other files if it is split.

    Raises:
        UnsupportedModel: its architecture is not read.
        CheckpointError: a file is missing or malformed.
    """
    paths = tuple(split_files(path))
    files = GgufFiles(paths, tuple(map(read_header, paths)))
    if str(files.metadata.get(ARCHITECTURE)) not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{path.name} holds a model of the architecture {str(files.metadata.get(ARCHITECTURE))[:64]!r}, which is "
            f"not read from GGUF; these are: {', '.join(ARCHITECTURES)}. Use the model's checkpoint in safetensors"
        )
    if len(files.tensors) != sum(len(header.tensors) for header in files.headers):
        raise CheckpointError(f"{path.name} and the files beside it hold a tensor twice. Download all of them again")
    for one, header in zip(paths, files.headers, strict=True):
        size = one.stat().st_size
        for name, tensor in header.tensors.items():
            if tensor.type not in _BLOCKS:
                raise CheckpointError(
                    f"{name} of {one.name} is packed in type {tensor.type} of GGUF, which is not read. Use a file in "
                    "Q8_0, or one whose types end in _0, _1 or _K"
                )
            values, packed = _BLOCKS[tensor.type]
            if tensor.shape[-1] % values:
                raise CheckpointError(f"{name} of {one.name} has the shape {list(tensor.shape)}, of no whole blocks")
            if tensor.offset + math.prod(tensor.shape) // values * packed > size:
                raise CheckpointError(f"{one.name} is shorter than its header says: download it again")
    return files


@dataclass(frozen=True)
class _Weight:
    """How a tensor of the family is made: of these of GGUF, each by its pattern, in this order, by these operations."""

    sources: dict[str, str]
    patterns: Sequence[str]
    operations: Sequence[ConversionOps]


@dataclass(frozen=True)
class GgufWeights:
    """The weights of a model in GGUF, by the family's names."""

    files: GgufFiles
    config: PreTrainedConfig

    @cached_property
    def _weights(self) -> dict[str, _Weight]:
        try:
            transforms = _transforms(self.files.architecture, self.config)
            with torch.device("meta"):
                known = families.causal_lm_class(self.config)(copy.deepcopy(self.config)).state_dict().keys()
        except Exception as error:  # a family's code raises anything if the sizes of a config do not go together
            raise CheckpointError(
                f"no model can be built by the config of {self.files.paths[0].name}: {error}"
            ) from error
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        found: dict[str, _Weight] = {}
        for name in self.files.tensors:
            renamed, pattern = rename_source_key(name, renamings, converters)
            made = _Weight({}, [renamed], ())
            if pattern is not None:
                made = _Weight({}, by_pattern[pattern].source_patterns, by_pattern[pattern].operations)
            sources = found.setdefault(renamed, made).sources
            if sources.setdefault(pattern or renamed, name) != name:
                raise CheckpointError(f"{self.files.paths[0].name} holds {renamed} twice, as {name} too")
        used = {name: one for name, one in found.items() if name not in _ROTARY and not name.startswith("mtp.")}
        unknown = next((name for name in used if name not in known), None)
        if unknown is not None:
            raise CheckpointError(
                f"{self.files.paths[0].name} has a tensor {next(iter(used[unknown].sources.values()))}, which a "
                f"{self.config.model_type} model as its config describes it does not have. Use the model's checkpoint "
                "in safetensors, or put its config.json beside the file"
            )
        return used

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """For each tensor's name, the file that holds it."""
        sources = {name: next(iter(one.sources.values())) for name, one in self._weights.items()}
        return {name: self.files.path_of(one).name for name, one in sources.items()}

    def read(self, names: Iterable[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor, unpacked to `dtype` if it is packed. Raises `CheckpointError`."""
        for name in names:
            weight = self._weights[name]
            values: dict[str, Any] = {one: self.files.dense(source, dtype) for one, source in weight.sources.items()}
            try:
                for operation in weight.operations:
                    values = operation.convert(
                        values, source_patterns=weight.patterns, target_patterns=[name], full_layer_name=name
                    )
                (tensor,) = values.values()
            except (RuntimeError, ValueError, LookupError) as error:
                raise CheckpointError(
                    f"{name} cannot be made of {', '.join(weight.sources.values())}, whose shapes are others than the "
                    f"config describes: {(str(error).splitlines() or [''])[0]}"
                ) from error
            yield name, tensor

    def stored(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """What the files hold of these tensors, under the names and types that they have there."""
        sources = [source for name in names for source in self._weights[name].sources.values()]
        return {f"{one} {self.files.tensors[one].type}": self.files.stored(one) for one in sources}


class _Made(ConversionOps):
    """One tensor, made by a function of those of GGUF in the order of their patterns."""

    def __init__(self, make: Callable[..., torch.Tensor]) -> None:
        self._make = make

    def convert(self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **more: Any) -> Any:
        return {target_patterns[0]: self._make(*(input_dict[one] for one in source_patterns))}


def _in_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head that turn together lie side by side, as in the first code of Llama: all first ones before
    all second ones, as transformers has them."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """Matrices of experts [experts, out, in] as [experts, in, out]; their biases as they are."""
    return tensor.mT.contiguous() if tensor.ndim == 3 else tensor


_NORMS = {
    **{r"^output_norm\.": "model.norm.", r"\.attn_norm\.": ".input_layernorm."},
    **{rf"\.attn_{one}_norm\.": f".self_attn.{one}_norm." for one in "qk"},
}
_AFTER_ATTENTION = {r"\.post_attention_norm\.": ".post_attention_layernorm."}
_DENSE = {r"\.ffn_norm\.": ".post_attention_layernorm."}
_EXPERTS = {
    **{r"\.ffn_gate_inp\.": ".mlp.gate.", r"\.ffn_down_exps\.weight": ".mlp.experts.down_proj"},
    r"\.ffn_gate_inp_shexp\.": ".mlp.shared_expert_gate.",
    **{rf"\.ffn_{one}_shexp\.": f".mlp.shared_expert.{one}_proj." for one in ("gate", "up", "down")},
}
_GEMMA = {
    r"\.ffn_norm\.": ".pre_feedforward_layernorm.",
    r"\.post_ffw_norm\.": ".post_feedforward_layernorm.",
}
_NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _DENSE),
    **dict.fromkeys(("qwen2moe", "qwen3moe"), _DENSE | _EXPERTS),
    **dict.fromkeys(("gemma2", "gemma3"), _AFTER_ATTENTION | _GEMMA),
    # The last one is renamed once more.
    "phi3": _DENSE | {r"\.attn_qkv\.": ".self_attn.qkv_proj.", r"\.mlp\.up_proj\.": ".mlp.gate_up_proj."},
    "gpt-oss": _AFTER_ATTENTION
    | {r"\.attn_sinks\.weight": ".self_attn.sinks", r"\.ffn_gate_inp\.": ".mlp.router."}
    | {r"\.ffn_down_exps\.bias": ".mlp.experts.down_proj_bias"},
}
"""For each architecture that transformers leaves to another package, its names beside those that all have."""


def _transforms(architecture: str, config: PreTrainedConfig) -> Sequence[WeightRenaming | WeightConverter]:
    """What makes the family's tensors of GGUF's, in transformers' terms."""
    if architecture in GGUF_ARCHS:
        values = getattr(config, "linear_num_value_heads", 0) * getattr(config, "linear_value_head_dim", 0)
        if values > MAX_WIDTH:  # transformers makes a list of them
            raise ValueError(f"its heads have {values} values, of which {MAX_WIDTH} are allowed")
        found: Sequence[WeightRenaming | WeightConverter] = get_gguf_conversion_mapping(architecture, config)
        return found
    names = _NORMS | _NAMES[architecture]
    gate_up = [r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"]
    made: list[tuple[str | list[str], str, Callable[..., torch.Tensor]]] = []
    if architecture == "llama":
        for role, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            for name in (f".self_attn.{role}_proj.{one}" for one in ("weight", "bias")):
                made.append((name, name, partial(_in_halves, heads=heads)))
    if architecture.startswith("gemma"):  # whose norms are stored plus one
        made = [(f"{source}weight", f"{target}weight", lambda norm: norm - 1) for source, target in names.items()]
        names = {}
    if architecture in ("qwen2moe", "qwen3moe"):
        made.append((gate_up, ".mlp.experts.gate_up_proj", lambda gate, up: torch.cat((gate, up), 1)))
        name = ".mlp.shared_expert_gate.weight"
        made.append((name, name, lambda gate: gate.view(1, -1)))
    if architecture == "gpt-oss":  # rows of gate and up take turns
        for one, end in (("weight", ""), ("bias", "_bias")):
            sources = [source.replace("weight", one) for source in gate_up]
            pairs = lambda *both: _turned(torch.stack(both, 2).flatten(1, 2))  # noqa: E731
            made.append((sources, f".mlp.experts.gate_up_proj{end}", pairs))
        made.append((r"\.ffn_down_exps\.weight", ".mlp.experts.down_proj", _turned))
    converters = [WeightConverter(source, target, operations=[_Made(one)]) for source, target, one in made]
    return [*DENSE_DECODER_RENAMINGS, *(WeightRenaming(*pair) for pair in names.items()), *converters]


def _unpacked(rows: torch.Tensor, kind: int) -> torch.Tensor:
    """The values of rows of packed bytes, in float32."""
    if kind in GGML_BLOCK:
        found: torch.Tensor = dequantize(rows.flatten(), kind)
        return found
    blocks = rows.view(-1, _BLOCKS[kind][1])
    nibbles = torch.cat((blocks[:, -16:] & 15, blocks[:, -16:] >> 4), 1)  # the second half of a block in the upper bits
    if kind == MXFP4:
        return blocks[:, :1].view(torch.float8_e8m0fnu).float() * _FP4[nibbles.int()]
    bits = (blocks[:, -20:-16, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    values = nibbles + (bits.flatten(1) << 4)
    scale = blocks[:, :2].view(torch.float16).float()
    if kind == Q5_0:
        return scale * (values.float() - 16)
    return scale * values + blocks[:, 2:4].view(torch.float16).float()
