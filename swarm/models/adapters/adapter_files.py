"""Reading adapters from files in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

They come from a local folder or a repository on the hub. Four methods are supported: LoRA, prompt tuning (virtual
tokens), deep prompt tuning, and a head alone. PEFT does not have the last two; their files name methods that PEFT
rejects, so that it does not silently leave something out. The files are foreign input: only safetensors are opened,
sizes are bounded, every key and shape is checked against the model, and NaN is rejected.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from swarm.data_structures import Span
from swarm.errors import AdapterError, AdapterMismatch
from swarm.models.adapters.adapter_config import MAX_LORA_RANK, AdapterConfig, parse_adapter_config
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.models.checkpoints.checkpoint import OTHER_TOWERS, Checkpoint
from swarm.models.checkpoints.config_reading import first_line
from swarm.models.cutting.model_inspection import LoraTargets, find_lora_targets

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_WEIGHTS_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 4 << 30
"""LoRA of rank 64 on all linear modules of a model of 405 billion parameters takes 3.3 GB."""

PROMPTS_KEY = "prompt_embeddings"

DEEP_PROMPTS_KEY = "deep_prompt_embeddings"

STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AdapterSource:
    """The place where an adapter's files are.

    Attributes:
        name: local folder or hub id.
        revision: branch, tag or commit of a hub repository.
        cache_dir: folder for files from the hub.
    """

    name: str
    revision: str | None = None
    cache_dir: str | Path | None = None

    def config(self) -> Any:
        """The parsed JSON of the config file. Raises `AdapterError` if the file is missing or unreadable."""
        path = self.fetch(CONFIG_FILE, MAX_CONFIG_BYTES)
        if path is None:
            raise AdapterError(f"{self.name} has no {CONFIG_FILE}, so it is not an adapter")
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise AdapterError(f"{CONFIG_FILE} of {self.name} cannot be read: {first_line(error)}") from error

    def weights(self) -> Path:
        """Path of the safetensors file. Raises `AdapterError` if it is missing; the message names a pickled file."""
        path = self.fetch(WEIGHTS_FILE, MAX_WEIGHTS_BYTES)
        if path is not None:
            return path
        for name in PICKLED_WEIGHTS_FILES:
            if self._has(name):
                raise AdapterError(
                    f"the weights of {self.name} are in {name}, a pickled file, which can run code when opened; only "
                    "safetensors are read. Save it with PEFT again: model.save_pretrained(FOLDER)"
                )
        raise AdapterError(f"{self.name} has no {WEIGHTS_FILE}")

    @property
    def _folder(self) -> Path:
        return Path(self.name).expanduser()

    def fetch(self, file: str, limit: int) -> Path | None:
        """The local path of a file, or None if the source does not have it.

        Raises:
            AdapterError: it has more than `limit` bytes, or the hub cannot be asked.
        """
        if self._folder.is_dir():
            path = self._folder / file
            size = path.stat().st_size if path.is_file() else None
        else:
            planned = self._dry_run(file)
            size = planned.file_size if planned is not None else None
        if size is None:
            return None
        if size > limit:
            raise AdapterError(f"{file} of {self.name} is {size} bytes long; at most {limit} are allowed")
        return path if self._folder.is_dir() else Path(self._download(file))

    def _has(self, file: str) -> bool:
        return (self._folder / file).is_file() if self._folder.is_dir() else self._dry_run(file) is not None

    def _dry_run(self, file: str) -> Any:
        """What downloading a file would fetch; None if the repository has no such file."""
        return self._download(file, dry_run=True)

    def _download(self, file: str, **options: Any) -> Any:
        try:
            return hf_hub_download(self.name, file, revision=self.revision, cache_dir=self.cache_dir, **options)
        except HFValidationError:
            raise AdapterError(f"{self.name!r} is neither a local folder nor an adapter's name on the hub") from None
        except LocalEntryNotFoundError as error:  # unlike its base class, it means that the hub did not answer
            raise AdapterError(
                f"{self.name} is not a local folder, and the hub cannot be reached: {first_line(error)}"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, OSError) as error:
            raise AdapterError(f"the hub has no {self.name} (or it is private): {first_line(error)}") from error


@dataclass(frozen=True, eq=False)
class StoredLoraFactors:
    """LoRA factors of one module, in float32: `scaling * up @ down` is added to its weight."""

    down: torch.Tensor
    up: torch.Tensor
    alpha: float
    scaling: float


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """An adapter's tensors in float32, validated against the model.

    Attributes:
        config: the adapter's config.
        lora: LoRA factors, by block and by module inside the block.
        prompts: virtual tokens `[positions, width of the embeddings]`, or None.
        deep_prompts: `[blocks, positions, hidden_size]`, or None.
        heads: fully trained tensors of modules outside the blocks, by their names in the model.
    """

    config: AdapterConfig
    lora: Mapping[int, Mapping[str, StoredLoraFactors]] = field(default_factory=dict)
    prompts: torch.Tensor | None = None
    deep_prompts: torch.Tensor | None = None
    heads: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def part(self, block: int) -> BlockAdapterWeights | None:
        """The adapter weights of a block of the whole model, or None if it has none."""
        factors = tuple(
            LoraFactors(module, one.down, scale_up(one.up, one.scaling))
            for module, one in self.lora.get(block, {}).items()
        )
        prompt = self.deep_prompts[block] if self.deep_prompts is not None else None
        return BlockAdapterWeights(prompt, factors) if factors or prompt is not None else None


def scale_up(up: torch.Tensor, scaling: float) -> torch.Tensor:
    """B as it is sent. All peers scale with this function, so that an adapter has the same bytes everywhere."""
    return up * scaling


def read_block_weights(
    source: str | Path,
    checkpoint: Checkpoint,
    span: Span,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    force: bool = False,
) -> dict[int, BlockAdapterWeights]:
    """The adapter weights of the blocks of `span`, in float32, as clients send them. Other blocks are left out.

    Virtual tokens and heads belong to the client, so an adapter of nothing else yields no weights. Arguments and errors
    are those of `read_adapter`.
    """
    stored = read_adapter(source, checkpoint, span, revision=revision, cache_dir=cache_dir, force=force)
    parts = {block: stored.part(block) for block in range(span.start, span.end)}
    return {block: part for block, part in parts.items() if part is not None}


def read_adapter(
    source: str | Path,
    checkpoint: Checkpoint,
    span: Span | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    force: bool = False,
) -> StoredAdapter:
    """Read an adapter from a local folder or a repository on the hub.

    Args:
        checkpoint: the model it is for.
        span: read LoRA factors of these blocks only; None for all blocks.
        revision: revision of the adapter's repository.
        cache_dir: folder for files from the hub.
        force: accept an adapter that was trained for another revision of the model.

    Raises:
        AdapterMismatch: the adapter was trained for another revision, or for a model of other sizes.
        AdapterError: the adapter is missing, pickled, broken or unsupported.
    """
    files = AdapterSource(str(source), revision, cache_dir)
    config = parse_adapter_config(files.config(), str(source))
    validate_base_model(config, checkpoint, str(source), force)
    path = files.weights()
    try:
        with safe_open(path, framework="pt", device="cpu") as tensors:
            return _AdapterReader(str(source), config, checkpoint, tensors).read(span or Span(0, checkpoint.blocks))
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} of {source} is not a readable safetensors file: {error}") from error


def validate_base_model(config: AdapterConfig, checkpoint: Checkpoint, source: str, force: bool) -> None:
    """Raise `AdapterMismatch` if the adapter was trained for another revision of the model."""
    if not is_exact_revision(config.revision):
        logger.warning("%s does not say for which revision of %s it was trained", source, checkpoint.name)
        return
    if config.revision == checkpoint.revision:
        return
    said = (
        f"{source} was trained for {config.base or 'a model'} of revision {config.revision}, and this is "
        f"{checkpoint.name} of revision {checkpoint.revision}"
    )
    if not force:
        raise AdapterMismatch(f"{said}; load that revision, or use force if you know that the weights are the same")
    logger.warning("%s; it is used anyway", said)


def is_exact_revision(revision: str | None) -> bool:
    """Whether a revision identifies the weights: a commit or a folder's digest, not a branch, which may move."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}|folder-[0-9a-f]+", revision) is not None


class _AdapterReader:
    """Sorts the tensors of one weights file by their purpose and validates them."""

    def __init__(self, source: str, config: AdapterConfig, checkpoint: Checkpoint, tensors: safe_open) -> None:
        self._source, self._config, self._checkpoint, self._tensors = source, config, checkpoint, tensors
        self._modules: LoraTargets = find_lora_targets(checkpoint.config)
        place = rf"(?:[a-z_]+\.){{0,3}}?{re.escape(self._modules.layers_path)}\.(\d{{1,9}})\.(.+)"
        self._lora = re.compile(rf"(?:base_model\.model\.)?({place})\.lora_(A|B)\.(?:default\.)?weight")

    def read(self, span: Span) -> StoredAdapter:
        halves: dict[int, dict[str, dict[str, str]]] = {}
        heads, prompts, deep = {}, None, None
        for key in self._tensors.keys():  # noqa: SIM118  (it is not a dict)
            if key == PROMPTS_KEY:
                prompts = self._tensor(key, (self._config.positions, None))
            elif key == DEEP_PROMPTS_KEY and self._config.is_deep:
                deep = self._tensor(key, (self._checkpoint.blocks, self._config.positions, self._hidden_size))
            elif (match := self._lora.fullmatch(key)) is not None and OTHER_TOWERS.match(key) is None:
                _, block, module, half = match.groups()
                halves.setdefault(self._block(int(block), key), {}).setdefault(module, {})[half] = key
            elif "lora_" in key:
                self._refuse(f"{key[:200]} is for a module outside the blocks, which servers do not compute")
            else:
                heads[re.sub(r"^base_model\.(model\.(?=.+\.))?", "", key)] = self._tensor(key, None)
        self._validate_completeness(bool(halves), prompts is not None, deep is not None, bool(heads))
        lora = {
            block: {module: self._factors(block, module, halves[block][module]) for module in sorted(halves[block])}
            for block in sorted(halves)
            if block in span
        }
        return StoredAdapter(self._config, lora, prompts, deep, heads)

    def _validate_completeness(self, has_lora: bool, has_prompts: bool, has_deep: bool, has_heads: bool) -> None:
        method = self._config.method
        wanted = (method == "lora", "ptune" in method, method == "deep_ptune", has_heads or method == "head")
        if (has_lora, has_prompts, has_deep, has_heads) != wanted:
            self._refuse(f"its tensors do not match its method, {self._config.peft_type}")

    def _factors(self, block: int, module: str, keys: Mapping[str, str]) -> StoredLoraFactors:
        size = self._modules.blocks[block].get(module)
        if size is None:
            self._refuse(f"block {block} of {self._checkpoint.name} has no linear module {module[:200]}")
        if set(keys) != {"A", "B"}:
            self._refuse(f"it has only one of LoRA's A and B for {module} of block {block}")
        rank, alpha = self._config.rank_and_alpha(_place(keys["A"]))
        if not 1 <= rank <= MAX_LORA_RANK:
            self._refuse(f"rank {rank} is not between 1 and {MAX_LORA_RANK}")
        down = self._tensor(keys["A"], (rank, size[0]))
        up = self._tensor(keys["B"], (size[1], rank))
        return StoredLoraFactors(down, up, alpha, lora_scaling(rank, alpha, self._config.use_rslora))

    def _tensor(self, key: str, shape: tuple[int | None, ...] | None) -> torch.Tensor:
        """Read a tensor as float32. `shape` is the required shape, with None for any size; None accepts any shape."""
        found = tuple(self._tensors.get_slice(key).get_shape())
        if shape is not None and (
            len(found) != len(shape) or any(want not in (None, size) for want, size in zip(shape, found, strict=True))
        ):
            said = ", ".join("any" if size is None else str(size) for size in shape)
            raise AdapterMismatch(
                f"{self._source} does not fit {self._checkpoint.name}: {key[:200]} is {list(found)} instead of [{said}]"
            )
        tensor: torch.Tensor = self._tensors.get_tensor(key)
        if tensor.dtype not in STORED_DTYPES:
            self._refuse(f"{key[:200]} is {tensor.dtype}; adapters are float32, float16 or bfloat16")
        if not bool(torch.isfinite(tensor).all()):
            self._refuse(f"{key[:200]} holds NaN or infinity")
        return tensor.float()

    def _block(self, block: int, key: str) -> int:
        if block >= self._checkpoint.blocks:
            raise AdapterMismatch(
                f"{self._source} does not fit {self._checkpoint.name}: {key[:200]} is for block {block}, and the model "
                f"has {self._checkpoint.blocks}"
            )
        return block

    @property
    def _hidden_size(self) -> int:
        return int(self._checkpoint.config.hidden_size)

    def _refuse(self, why: str) -> NoReturn:
        raise AdapterError(f"the adapter {self._source} cannot be used: {why}")


def lora_scaling(rank: int, alpha: float, use_rslora: bool) -> float:
    """The factor of `up @ down` (Hu et al. 2021; with `use_rslora` Kalajdzievski 2023)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def _place(key: str) -> str:
    """A module's path in the model, from the key of its A."""
    return key.removeprefix("base_model.model.").partition(".lora_A.")[0]
