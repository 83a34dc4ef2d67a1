"""A checkpoint on disk or on the hub: its config, and those of its tensors that are needed.

Only shards that hold a requested tensor are opened or downloaded. Only safetensors and GGUF are read: pickled weights
can run code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedConfig

from swarm.common.files.atomic_file import read_small
from swarm.common.files.checked_json import fields, mapping, parse_json, text
from swarm.common.files.gguf_header import SUFFIX, gguf_in, model_name, split_files
from swarm.errors import CheckpointError, HubUnreachable, InvalidSpan, ModelNotFound, UnsupportedModel, UsageError
from swarm.models.checkpoints import config_limits, packed_weights
from swarm.models.checkpoints.block_digest import block_digest
from swarm.models.checkpoints.config_reading import first_line, read_config, whole_config
from swarm.models.checkpoints.gguf_weights import GgufFiles, GgufWeights, open_files
from swarm.models.checkpoints.part_folder import PARTS_FILE, PartFolder, read_part_folder
from swarm.models.checkpoints.safetensors_header import DTYPES, read_header
from swarm.models.cutting import families
from swarm.models.cutting.model_inspection import ModelStructure, inspect_model

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
MAX_FILE_NAME_CHARACTERS = 255
MAX_TENSOR_NAME_CHARACTERS = 1024
"""The names of tensors are matched by regular expressions, which takes time in proportion to the square of this."""

OTHER_TOWERS = re.compile(r"(?:^|.*\.)(?:(?:[a-z]+_)*(?:vision|visual|audio|image|projector)|encoder|mtp)")
"""Beginnings of the names of tensors that no token of a text passes."""

_NO_TOWER = re.compile(
    r"(?:model\.)?(?:language_model|text_model)\..+|lm_head\..+|(?:model\.)?(?:embed_tokens|norm)\..+|(?:.+\.)?mtp.+"
)
_IN_WRAPPER = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(.+)")
POOLING_FILE = "1_Pooling/config.json"
"""Where sentence-transformers keeps how embeddings are made."""

Pooling = Literal["mean", "last"]
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
"""The small trained model that comes with the package."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's config and weights files. Create one with `open_checkpoint`.

    Attributes:
        name: the model's name in the swarm: the hub id, or the name of the folder or the GGUF file.
        source: the local folder, the GGUF file or the hub id.
        revision: what peers compare: the hub's commit, or for a folder a digest of its config and tensor index (in
            GGUF, of the files' headers).
        config: transformers config, of the language model if the checkpoint's wraps it; copy it before changing it. Its
            dtype is the checkpoint's own.
        fetch: downloads one of the checkpoint's files if necessary, and returns its local path.
        cached: the local path of one of its files if it is on this machine, else None.
        parts: what says where tensors are, if these are parts of a model; None if the checkpoint's index does.
        gguf: the weights, if they are in GGUF.
    """

    name: str
    source: str
    revision: str
    config: PreTrainedConfig
    fetch: Callable[[str], Path] = field(repr=False)
    cached: Callable[[str], Path | None] = field(repr=False)
    parts: PartFolder | None = field(default=None, repr=False)
    gguf: GgufWeights | None = field(default=None, repr=False)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """For each tensor's name, the file that holds the tensor."""
        files = self._files_of_tensors()
        longest = max(map(len, files), default=0)
        if longest > MAX_TENSOR_NAME_CHARACTERS:
            raise CheckpointError(
                f"a tensor of {self.source} has a name of {longest} characters; at most {MAX_TENSOR_NAME_CHARACTERS} "
                "are allowed. Use a checkpoint from a source that you trust"
            )
        return files

    def _files_of_tensors(self) -> dict[str, str]:
        if self.parts is not None:
            return self.parts.weight_map
        if self.gguf is not None:
            return self.gguf.weight_map
        try:
            return _parse_weight_map(read_small(self.fetch(INDEX_FILE), MAX_INDEX_BYTES))
        except EntryNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{INDEX_FILE} of {self.source} cannot be read: {first_line(error)}") from error
        try:
            with _open(self.fetch(SINGLE_FILE)) as shard:
                return dict.fromkeys(shard.keys(), SINGLE_FILE)
        except EntryNotFoundError:
            raise CheckpointError(
                f"{self.source} has no safetensors weights ({SINGLE_FILE} or {INDEX_FILE}). "
                "Convert it with transformers: model.save_pretrained(FOLDER)"
            ) from None

    @cached_property
    def stored_tensors(self) -> Mapping[str, tuple[str, int]]:
        """For each tensor, safetensors' name of its dtype, and its bytes; of GGUF nothing. No weights are read.

        Raises `CheckpointError` if a file is not here, and the hub does not say what is in it. It is asked only if the
        config says that weights are packed.
        """
        found = dict(self.parts.stored) if self.parts is not None else {}
        if self.gguf is not None:
            return found
        for file in sorted({file for name, file in self.weight_map.items() if name not in found}):
            is_asked = packed_weights.quantization_of(self.config) or self.cached(file) is not None
            header = _header(self, file) if is_asked else None
            if header is None:
                raise CheckpointError(f"nothing says which tensors are in {file} of {self.source}")
            found |= header
        return found

    def read_tensors(
        self, is_needed: Callable[[str], bool], dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor on the CPU as stored) for each tensor that `is_needed` accepts, file by file.

        Args:
            dtype: of what GGUF packs, which is unpacked.
        """
        names = filter(is_needed, self.weight_map)
        yield from self._read(names) if self.gguf is None else self.gguf.read(names, dtype)

    def _read(self, tensor_names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[str, list[str]] = {}
        for name in tensor_names:
            by_file.setdefault(self.weight_map[name], []).append(name)
        for file, names in by_file.items():
            try:
                path = self.fetch(file)
            except EntryNotFoundError:
                raise CheckpointError(
                    f"{file} is missing from {self.source}; it holds {names[0]}. Download the checkpoint again"
                ) from None
            with _open(path) as shard:
                for name in names:
                    yield name, _tensor(shard, name, file)

    @cached_property
    def structure(self) -> ModelStructure:
        """Where the model keeps its layers and how large they are, see `ModelStructure`."""
        try:
            return inspect_model(self.config)
        except UnsupportedModel:
            raise
        except Exception as error:  # a family's code raises anything if the sizes of a config do not go together
            raise CheckpointError(
                f"no model can be built by config.json of {self.source}: {first_line(error)}"
            ) from error

    @property
    def blocks(self) -> int:
        """Number of blocks of the whole model."""
        return families.number_of_blocks(self.config)

    def locate(self, name: str) -> tuple[int, str] | None:
        """(block, name inside the block) of a tensor, or None if the tensor does not belong to a served block."""
        if name not in self._places:
            match = self._block_names.match(name)
            found = (int(match[1]), match[2]) if match is not None and int(match[1]) < self.blocks else None
            self._places[name] = found
        return self._places[name]

    def is_client_tensor(self, name: str) -> bool:
        """Whether a tensor may belong to the client's part of the model (embeddings, final norm, head).

        Tensors of blocks do not, nor do those of layers that tokens never pass (such as multi-token prediction after
        the last block) or of a tower for images or audio.
        """
        return self._block_names.match(name) is None and OTHER_TOWERS.search(name) is None

    def client_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors of the client's part of the model, by the names that the causal language model has for them.

        Args:
            dtype: see `read_tensors`.
        """
        return {_unwrapped(name): tensor for name, tensor in self.read_tensors(self.is_client_tensor, dtype)}

    def tower_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a wrapper that belong to none of its language model's parts, by their names in the files."""
        return dict(self.read_tensors(lambda name: not (self._block_names.match(name) or _NO_TOWER.fullmatch(name))))

    def whole_config(self) -> PreTrainedConfig:
        """The config as it is published: that of the wrapper if there is one, else that of the model."""
        try:
            path = self.fetch(constants.CONFIG_NAME)
            return whole_config(path, json.loads(read_small(path, config_limits.MAX_CONFIG_BYTES)))
        except EntryNotFoundError:
            return self.config

    @cached_property
    def _places(self) -> dict[str, tuple[int, str] | None]:
        """Cache of `locate`: a large checkpoint has a hundred thousand names, which are searched for every block."""
        return {}

    @cached_property
    def _block_names(self) -> re.Pattern[str]:
        # A checkpoint may have been saved from the base model or from a model that wraps it; only a wrapper's name
        # ("model.", "transformer.", "language_model.model.") may precede the path.
        wrappers = rf"(?!{OTHER_TOWERS.pattern})(?:[a-z_]+\.){{0,3}}?"
        return re.compile(rf"^{wrappers}{re.escape(self.structure.layers_path)}\.(\d{{1,9}})\.(.+)$")

    def block_digests(self, start: int, end: int) -> list[str] | None:
        """Digests of blocks [start, end), or None if some of their tensors are not on this machine."""
        blocks: dict[int, dict[str, str]] = {block: {} for block in range(start, end)}
        for name in self.weight_map:
            place = self.locate(name)
            if place is not None and place[0] in blocks:
                blocks[place[0]][name] = place[1]
        files = {self.weight_map[name] for names in blocks.values() for name in names}
        if not all(blocks.values()) or any(self.cached(file) is None for file in files):
            return None
        if self.gguf is not None:
            return [block_digest(self.gguf.stored(names)) for names in blocks.values()]
        # Each block opens its files again: pages that were read stay in memory until the files are closed.
        return [block_digest({names[name]: one for name, one in self._read(names)}) for names in blocks.values()]

    def validate_span(self, start: int, end: int) -> None:
        """Raise `InvalidSpan` unless [start, end) lies inside the model."""
        if not 0 <= start < end <= self.blocks:
            raise InvalidSpan(f"blocks {start}:{end} do not lie inside {self.name}, which has blocks 0:{self.blocks}")

    def generation_config(self) -> GenerationConfig | None:
        """The checkpoint's generation settings, or None if it has none."""
        try:
            path = self.fetch("generation_config.json")
        except EntryNotFoundError:
            return None
        try:
            read_small(path, config_limits.MAX_CONFIG_BYTES)
            found = GenerationConfig.from_pretrained(str(path.parent), local_files_only=True)
        except Exception as error:  # foreign input, which transformers validates in many places
            raise CheckpointError(f"{path.name} of {self.source} cannot be used: {first_line(error)}") from error
        if problem := config_limits.generation_problem(lambda name: getattr(found, name, None)):
            raise CheckpointError(f"{path.name} of {self.source} cannot be used: {problem}")
        return found

    def pooling(self) -> Pooling | None:
        """How the states of a text become its embedding: as the model's authors say in a file, or else their mean.

        None if that cannot be known, because the file is not on this machine and the hub does not answer.
        """
        try:
            asked = json.loads(read_small(self.fetch(POOLING_FILE), config_limits.MAX_CONFIG_BYTES))
        except EntryNotFoundError:
            return "mean"
        except HubUnreachable:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{POOLING_FILE} of {self.source} cannot be used: {first_line(error)}") from error
        is_last = isinstance(asked, dict) and asked.get("pooling_mode_lasttoken") is True
        return "last" if is_last else "mean"


def open_checkpoint(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    name: str | None = None,
) -> Checkpoint:
    """Find a model and read its config; no weights are read.

    Args:
        model: local folder, GGUF file or hub id; None for the demo model that comes with the package.
        revision: branch, tag or commit of a hub repository.
        cache_dir: folder for files from the hub.
        name: the model's name in the swarm, if not the hub id or the name of the folder or file.

    Raises:
        ModelNotFound: there is no such folder or repository.
        UnsupportedModel: the family cannot be cut into spans.
    """
    source = str(model if model is not None else DEMO_FOLDER)
    folder = Path(source).expanduser()
    is_file = folder.suffix == SUFFIX and not folder.is_dir()
    if not folder.is_dir() and not is_file:
        found = _open_repository(source, revision, cache_dir, name or source)
    elif revision is not None:
        raise ModelNotFound(f"{source} is on this machine, and has no revision {revision!r}; leave --revision out")
    elif is_file and not folder.is_file():
        raise ModelNotFound(f"{folder} does not exist; give the path of a GGUF file, a folder, or a hub id")
    elif is_file:
        found = _open_folder(folder.parent, name, folder)
    else:
        found = _open_folder(folder, name or ("swarm-demo" if model is None else None))
    if getattr(found.config, "dtype", None) is None:
        with suppress(UsageError):  # whoever reads the weights says what is wrong with them
            found.config.dtype = _stored_dtype(found)
    return found


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The dtype that transformers takes where config.json names none: the index's, or that of the first weight."""
    files = {SINGLE_FILE} if checkpoint.parts is None else set(checkpoint.weight_map.values())
    if checkpoint.parts is None:
        with suppress(EntryNotFoundError):
            path = checkpoint.fetch(INDEX_FILE)
            files = set(checkpoint.weight_map.values())
            metadata = json.loads(path.read_bytes()).get("metadata")
            named = getattr(torch, str(metadata.get("dtype")), None) if isinstance(metadata, dict) else None
            if isinstance(named, torch.dtype):
                return named
    first, *others = sorted(files) or [""]
    here = [file for file in others if checkpoint.cached(file) is not None]
    found = _header(checkpoint, first) or (_header(checkpoint, here[0]) if here else None) or {}
    dtypes = [DTYPES[found[tensor][0]] for tensor in sorted(found) if found[tensor][0] in DTYPES]
    return next((one for one in dtypes if one.is_floating_point and one.itemsize > 1), None)


def _header(checkpoint: Checkpoint, file: str) -> dict[str, tuple[str, int]] | None:
    """The dtypes and bytes of the tensors in a file; None if it is not here. Of a file on the hub, only the header is
    read."""
    path = checkpoint.cached(file)
    if path is not None:
        return {name: (one.dtype, one.size_bytes) for name, one in read_header(path).items()}
    if not Path(checkpoint.source).is_dir():
        with suppress(Exception):  # the hub does not answer; which errors that raises is up to the hub's library
            found = HfApi().parse_safetensors_file_metadata(checkpoint.source, file, revision=checkpoint.revision)
            return {name: (one.dtype, one.data_offsets[1] - one.data_offsets[0]) for name, one in found.tensors.items()}
    return None


def _parse_weight_map(index: bytes) -> dict[str, str]:
    """The index's table of tensors and files. Raises `ValueError`, or `RecursionError`, if it is malformed.

    The index is foreign input, so it must not name a file elsewhere on this machine.
    """
    (files,) = fields(parse_json(index), ["weight_map"], closed=False)
    for file in mapping(files).values():
        name = text(file, MAX_FILE_NAME_CHARACTERS)
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{name!r} is not the name of a safetensors file in the same folder")
    return mapping(files)


def _open_folder(folder: Path, name: str | None, file: Path | None = None) -> Checkpoint:
    """The checkpoint in a folder, or one GGUF file (with its other parts) and nothing else of its folder."""
    ours = None if file is None else {one.name for one in split_files(file)}

    def cached(one: str) -> Path | None:
        return folder / one if (ours is None or one in ours) and (folder / one).is_file() else None

    def fetch(one: str) -> Path:
        path = cached(one)
        if path is None:
            raise EntryNotFoundError(one)
        return path

    if file is None and not any(map(cached, (SINGLE_FILE, INDEX_FILE, PARTS_FILE))):
        file = gguf_in(folder)
    if file is not None:
        return _of_gguf(open_files(file), str(folder if ours is None else file), name, fetch, cached)
    config = read_config(fetch, str(folder))
    try:
        parts = read_part_folder(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{PARTS_FILE} of {folder} cannot be used: {first_line(error)}") from error
    if parts is not None:
        return Checkpoint(name or parts.model, str(folder), parts.revision, config, fetch, cached, parts)
    return Checkpoint(name or folder.resolve().name, str(folder), _folder_revision(folder), config, fetch, cached)


def _of_gguf(
    files: GgufFiles, source: str, name: str | None, fetch: Callable[[str], Path], cached: Callable[[str], Path | None]
) -> Checkpoint:
    beside = cached(constants.CONFIG_NAME)
    config = read_config(fetch, source, files if beside is None else None)
    if getattr(config, "dtype", None) is None:
        config.dtype = files.dtype
    state = hashlib.sha256(b"".join(one.digest for one in files.headers))
    if beside is not None:
        state.update(read_small(beside, config_limits.MAX_CONFIG_BYTES))
    revision = "gguf-" + state.hexdigest()[:12]
    name = name or (Path(source).resolve().name if Path(source).is_dir() else model_name(files.paths[0]))
    return Checkpoint(name, source, revision, config, fetch, cached, gguf=GgufWeights(files, config))


def _folder_revision(folder: Path) -> str:
    """A digest of a folder's config and index, without opening its shards; block digests cover the values."""
    state = hashlib.sha256((folder / "config.json").read_bytes())
    try:
        if (folder / INDEX_FILE).is_file():
            state.update(read_small(folder / INDEX_FILE, MAX_INDEX_BYTES))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{INDEX_FILE} of {folder} cannot be used: {first_line(error)}") from error
    return "folder-" + state.hexdigest()[:12]


def _open_repository(repository: str, revision: str | None, cache_dir: str | Path | None, name: str) -> Checkpoint:
    commit = revision

    def fetch(file: str) -> Path:
        try:
            return Path(hf_hub_download(repository, file, revision=commit, cache_dir=cache_dir))
        except HFValidationError:
            raise ModelNotFound(f"{repository!r} is neither a local folder nor a model's name on the hub") from None
        except LocalEntryNotFoundError as error:  # unlike its base class, it means that the hub did not answer
            raise _unreachable(repository, error) from error
        except EntryNotFoundError:
            raise
        except HfHubHTTPError as error:
            raise ModelNotFound(f"the model hub has no {repository} (or it is private): {first_line(error)}") from error
        except OSError as error:
            raise _unreachable(repository, error) from error

    def cached(file: str) -> Path | None:
        found = try_to_load_from_cache(repository, file, cache_dir=cache_dir, revision=commit)
        return Path(found) if isinstance(found, str) else None

    config = read_config(fetch, repository)
    # The cache keeps files under snapshots/<commit>. From here on, every file comes from this commit.
    commit = fetch(constants.CONFIG_NAME).parent.name
    return Checkpoint(name, repository, commit, config, fetch, cached)


def _unwrapped(name: str) -> str:
    """A tensor's name in the causal language model, from its name in any published form of a wrapper around it."""
    match = _IN_WRAPPER.fullmatch(name)
    if match is None:
        return name
    inside = match[1]
    return inside if inside.partition(".")[0] in ("model", "lm_head") else f"model.{inside}"


def _unreachable(repository: str, error: Exception) -> HubUnreachable:
    return HubUnreachable(
        f"{repository} is not a local folder, and the model hub cannot be reached: {first_line(error)}"
    )


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error


def _tensor(shard: safe_open, name: str, file: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = shard.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{file} does not hold the tensor {name}, although the index says so: {error}") from error
    return tensor
