"""A checkpoint on disk or on the hub: its config, and just those tensors that somebody asks for.

Only shards that hold a wanted tensor are opened or downloaded. Only safetensors are read: pickled weights can run code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from swarm.errors import CheckpointError, InvalidSpan, ModelNotFound
from swarm.models.checkpoints.block_digest import block_digest
from swarm.models.cutting import families
from swarm.models.cutting.model_inspection import ModelStructure, inspect_model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OTHER_TOWERS = re.compile(r"(?:^|.*\.)(?:vision|visual|audio|encoder|mtp)")
DEMO = Path(__file__).parents[1] / "demo"
"""The small trained model that the package carries."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's files. Make one with `open_checkpoint`.

    Attributes:
        name: what the swarm calls the model: the hub id, or the folder's name.
        source: the local folder or the hub id.
        revision: what the swarm compares: the hub's commit, or for a folder a digest of its config and tensor index.
        config: transformers config; copy it before changing it.
    """

    name: str
    source: str
    revision: str
    config: PreTrainedConfig
    fetch: Callable[[str], Path] = field(repr=False)

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor name -> file that holds it."""
        try:
            return _weight_map(self.fetch(INDEX).read_bytes())
        except EntryNotFoundError:
            pass
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{INDEX} of {self.source} cannot be read: {_first_line(error)}") from error
        try:
            with _open(self.fetch(SINGLE)) as shard:
                return dict.fromkeys(shard.keys(), SINGLE)
        except EntryNotFoundError:
            raise CheckpointError(
                f"{self.source} has no safetensors weights ({SINGLE} or {INDEX}). "
                "Convert it with transformers: model.save_pretrained(FOLDER)"
            ) from None

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor on the CPU as stored) of the tensors that `wanted` accepts, file by file."""
        yield from self._read(filter(wanted, self.files))

    def _read(self, wanted: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[str, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self.files[name], []).append(name)
        for file, names in by_file.items():
            try:
                path = self.fetch(file)
            except EntryNotFoundError:
                raise CheckpointError(f"{self.source} has lost {file}, which holds {names[0]}") from None
            with _open(path) as shard:
                for name in names:
                    yield name, _tensor(shard, name, file)

    @cached_property
    def structure(self) -> ModelStructure:
        """How the model is built, see `ModelStructure`."""
        return inspect_model(self.config)

    @property
    def blocks(self) -> int:
        """Number of blocks of the whole model."""
        return families.number_of_blocks(self.config)

    def locate(self, name: str) -> tuple[int, str] | None:
        """(block, name inside the block) of a tensor, or None if it belongs to no block that is served."""
        if name not in self._places:
            match = self._block_names.match(name)
            found = (int(match[1]), match[2]) if match is not None and int(match[1]) < self.blocks else None
            self._places[name] = found
        return self._places[name]

    def is_head(self, name: str) -> bool:
        """Whether a tensor may be the client's: neither a block's, nor of layers that no token passes (such as those
        for multi-token prediction behind the last block), nor of a tower for images or sound."""
        return self._block_names.match(name) is None and _OTHER_TOWERS.search(name) is None

    @cached_property
    def _places(self) -> dict[str, tuple[int, str] | None]:
        """What `locate` found: a large checkpoint has a hundred thousand names and is gone through for every block."""
        return {}

    @cached_property
    def _block_names(self) -> re.Pattern[str]:
        # Checkpoints may be saved from the base model or from a model around it; nothing but a wrapper's name
        # ("model.", "transformer.", "language_model.model.") may stand in front of the path.
        wrappers = rf"(?!{_OTHER_TOWERS.pattern})(?:[a-z_]+\.){{0,3}}?"
        return re.compile(rf"^{wrappers}{re.escape(self.structure.path)}\.(\d+)\.(.+)$")

    def digests(self, start: int, end: int) -> list[str] | None:
        """Digests of blocks [start, end), or None if not all of their files are on this machine."""
        if not Path(self.source).is_dir():
            return None
        blocks: dict[int, dict[str, str]] = {block: {} for block in range(start, end)}
        for name in self.files:
            place = self.locate(name)
            if place is not None and place[0] in blocks:
                blocks[place[0]][name] = place[1]
        if any(not (Path(self.source) / self.files[name]).exists() for names in blocks.values() for name in names):
            return None
        # Each block's files are opened anew: what was looked at stays in memory until they are closed.
        return [block_digest({names[name]: one for name, one in self._read(names)}) for names in blocks.values()]

    def check_span(self, start: int, end: int) -> None:
        """Raise `InvalidSpan` unless [start, end) lies inside the model."""
        if not 0 <= start < end <= self.blocks:
            raise InvalidSpan(f"blocks {start}:{end} do not lie inside {self.name}, which has blocks 0:{self.blocks}")

    def generation_config(self) -> GenerationConfig | None:
        """The checkpoint's generation settings, if it has any."""
        try:
            path = self.fetch("generation_config.json")
        except EntryNotFoundError:
            return None
        try:
            return GenerationConfig.from_pretrained(str(path.parent), local_files_only=True)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.name} of {self.source} cannot be used: {_first_line(error)}") from error


def open_checkpoint(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    name: str | None = None,
) -> Checkpoint:
    """Find a model and read its config; no weights are opened or downloaded.

    Args:
        model: local folder or hub id; None for the demo model that the package carries.
        revision: branch, tag or commit of a hub repository.
        cache_dir: where hub files are kept.
        name: what the swarm calls the model, if not the hub id or the folder's name.

    Raises:
        ModelNotFound: there is no such folder or repository.
        UnsupportedModel: the family cannot be cut into spans.
    """
    source = str(model if model is not None else DEMO)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelNotFound(f"{source} is a local folder, which has no revision {revision!r}; leave --revision out")
        return _open_folder(folder, name or ("swarm-demo" if model is None else folder.resolve().name))
    return _open_repository(source, revision, cache_dir, name or source)


def _weight_map(index: bytes) -> dict[str, str]:
    """The index's table of tensors and files; raises what foreign input makes it raise.

    The index comes with the checkpoint, so it must not name a file elsewhere on this machine.
    """
    files = dict(json.loads(index)["weight_map"])
    for file in files.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{file!r} is not the name of a safetensors file beside it")
    return files


def _open_folder(folder: Path, name: str) -> Checkpoint:
    def fetch(file: str) -> Path:
        path = folder / file
        if not path.is_file():
            raise EntryNotFoundError(file)
        return path

    config = _read_config(fetch, str(folder))
    return Checkpoint(name, str(folder), _folder_revision(folder), config, fetch)


def _folder_revision(folder: Path) -> str:
    """A digest of what a folder says about itself without its shards being opened; block digests cover the values."""
    state = hashlib.sha256((folder / "config.json").read_bytes())
    if (folder / INDEX).is_file():
        state.update((folder / INDEX).read_bytes())
    return "folder-" + state.hexdigest()[:12]


def _open_repository(repository: str, revision: str | None, cache_dir: str | Path | None, name: str) -> Checkpoint:
    commit = revision

    def fetch(file: str) -> Path:
        try:
            return Path(hf_hub_download(repository, file, revision=commit, cache_dir=cache_dir))
        except HFValidationError:
            raise ModelNotFound(f"{repository!r} is neither a local folder nor a model's name on the hub") from None
        except LocalEntryNotFoundError as error:  # of all missing files, only this one may exist on the hub
            raise _unreachable(repository, error) from error
        except EntryNotFoundError:
            raise
        except HfHubHTTPError as error:
            raise ModelNotFound(
                f"the model hub has no {repository} (or it is private): {_first_line(error)}"
            ) from error
        except OSError as error:
            raise _unreachable(repository, error) from error

    config = _read_config(fetch, repository)
    # The cache keeps files under snapshots/<commit>; from here on every file comes from that same commit.
    commit = fetch(constants.CONFIG_NAME).parent.name
    return Checkpoint(name, repository, commit, config, fetch)


def _read_config(fetch: Callable[[str], Path], source: str) -> PreTrainedConfig:
    try:
        path = fetch(constants.CONFIG_NAME)
    except EntryNotFoundError:
        raise ModelNotFound(f"{source} has no config.json, so it is no transformers model") from None
    try:
        config = AutoConfig.from_pretrained(str(path.parent), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # foreign input, which each family checks in its own way
        raise ModelNotFound(f"config.json of {source} cannot be used: {_first_line(error)}") from error
    families.check_supported(config)
    return config


def _unreachable(repository: str, error: Exception) -> ModelNotFound:
    return ModelNotFound(f"{repository} is no local folder, and the model hub cannot be reached: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error


def _tensor(shard: safe_open, name: str, file: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = shard.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{file} does not hold the tensor {name} that the index promises: {error}") from error
    return tensor
