"""What a client trains for early exit: a lens for each boundary, and a classifier.

A lens turns hidden states in front of a block into about what the last block will make of them, so that the model's
own norm and head can read them ("tuned lens", Belrose et al., 2023). A classifier says how probably the token that is
then chosen is the full model's ("Confident Adaptive Language Modeling", section 3.5). Both go into one file of
safetensors that names the model for which they were trained.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm.errors import AdapterError, AdapterMismatch

EXITS_FILE = "exits.safetensors"
FORMAT = "swarm-exits-1"
MAX_LENSES = 1024
BLOCK_NUMBER = re.compile("[0-9]{1,6}")


@dataclass(frozen=True, eq=False)
class ExitLens:
    """An affine map, float32: `weight_HH` `[in, out]` and `bias_H`."""

    weight_HH: torch.Tensor
    bias_H: torch.Tensor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[..., H]` as the last block would leave them, about; same dtype."""
        return (hidden.float() @ self.weight_HH + self.bias_H).to(hidden.dtype)


@dataclass(frozen=True, eq=False)
class ExitClassifier:
    """A logistic regression over hidden states, float32: `weight_H` and `bias` of one value."""

    weight_H: torch.Tensor
    bias: torch.Tensor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The probability that the token which is chosen here is the full model's, `[...]` for `[..., H]`."""
        return torch.sigmoid(hidden.float() @ self.weight_H + self.bias)


@dataclass(frozen=True)
class BaseModel:
    """The model for which exits were trained.

    Attributes:
        name, revision: as announced in the swarm.
        hidden_size, blocks: of the model.
    """

    name: str
    revision: str
    hidden_size: int
    blocks: int


@dataclass(frozen=True)
class TrainedExits:
    """Lenses and classifiers, by the block in front of which they are used.

    Attributes:
        base: the model.
    """

    base: BaseModel
    lenses: Mapping[int, ExitLens] = field(default_factory=dict)
    classifiers: Mapping[int, ExitClassifier] = field(default_factory=dict)

    def to(self, device: torch.device) -> TrainedExits:
        """The same on a device; tensors that are there already are shared."""
        lenses = {b: ExitLens(one.weight_HH.to(device), one.bias_H.to(device)) for b, one in self.lenses.items()}
        classifiers = {
            b: ExitClassifier(one.weight_H.to(device), one.bias.to(device)) for b, one in self.classifiers.items()
        }
        return TrainedExits(self.base, lenses, classifiers)

    def save(self, folder: str | Path) -> None:
        """Write them into `folder`, which is created if it is missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for block, lens in self.lenses.items():
            tensors[f"lens.{block}.weight"], tensors[f"lens.{block}.bias"] = lens.weight_HH, lens.bias_H
        for block, classifier in self.classifiers.items():
            tensors[f"classifier.{block}.weight"] = classifier.weight_H
            tensors[f"classifier.{block}.bias"] = classifier.bias
        metadata = {"format": FORMAT, "name": self.base.name, "revision": self.base.revision}
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / EXITS_FILE, metadata=metadata)

    @classmethod
    def load(cls, folder: str | Path, base: BaseModel) -> TrainedExits:
        """Read what `save` wrote: all of it. `StoredExits` reads some.

        Args:
            base: the model that they are for.

        Raises:
            AdapterMismatch: they were trained for another model or revision.
            AdapterError: the file is missing or broken.
        """
        return StoredExits.open(folder, base).load(range(base.blocks))


@dataclass(frozen=True)
class StoredExits:
    """A file of lenses and classifiers of which only the header was read.

    Attributes:
        path: of the file.
        base: the model that they are for.
        lenses, classifiers: the blocks that have one.
    """

    path: Path
    base: BaseModel
    lenses: frozenset[int]
    classifiers: frozenset[int]

    @classmethod
    def open(cls, folder: str | Path, base: BaseModel) -> StoredExits:
        """Read the header of what `TrainedExits.save` wrote. Raises what `TrainedExits.load` raises."""
        path = Path(folder) / EXITS_FILE
        with _opened(path, base) as (_, found):
            return found

    def weight_bytes(self, block: int) -> int:
        """Memory that the lens and the classifier in front of a block take; 0 if it has none."""
        width = self.base.hidden_size
        values = (block in self.lenses) * (width * width + width) + (block in self.classifiers) * (width + 1)
        return values * torch.float32.itemsize

    def load(self, blocks: Container[int]) -> TrainedExits:
        """Read those in front of `blocks`. Raises what `TrainedExits.load` raises: the file may have changed."""
        with _opened(self.path, self.base) as (stored, now):
            return _read(stored, now, blocks)


@contextmanager
def _opened(path: Path, base: BaseModel) -> Iterator[tuple[safe_open, StoredExits]]:
    """The file, and what its header says; shapes are checked before anything is read."""
    try:
        with safe_open(path, framework="pt", device="cpu") as stored:
            require_base(stored.metadata() or {}, base, path, FORMAT, "exits", "model.train_exits")
            yield stored, _read_header(stored, base, path)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is not a readable safetensors file: {error}") from error


def require_base(
    metadata: Mapping[str, str], base: BaseModel, path: Path, file_format: str, what: str, method: str
) -> None:
    """Check what a file says of itself.

    Args:
        what: it should hold, which `method` trains.

    Raises:
        AdapterMismatch: it was trained for another model or revision.
        AdapterError: it holds something else.
    """
    if metadata.get("format") != file_format:
        raise AdapterError(f"{path} does not hold {what} of a model; {method} trains that")
    if metadata.get("revision") != base.revision:
        raise AdapterMismatch(
            f"{path} was trained for revision {metadata.get('revision')} of {metadata.get('name')}, and this is "
            f"{base.revision} of {base.name}; train {what} for it with {method}"
        )


def _read_header(stored: safe_open, base: BaseModel, path: Path) -> StoredExits:
    width = base.hidden_size
    shapes = {"lens": ([width, width], [width]), "classifier": ([width], [1])}
    found: dict[str, set[int]] = {kind: set() for kind in shapes}
    names = set(stored.keys())
    if len(names) > 2 * MAX_LENSES:
        raise AdapterError(f"{path} has {len(names)} tensors; no model has so many blocks")
    for name in names:
        kind, _, rest = name.partition(".")
        block, _, part = rest.partition(".")
        if kind not in shapes or part not in ("weight", "bias") or not BLOCK_NUMBER.fullmatch(block):
            raise AdapterError(f"{path} has a tensor {name!r}, which is no part of a lens or classifier")
        piece = stored.get_slice(name)
        if piece.get_shape() != shapes[kind][part == "bias"] or piece.get_dtype() != "F32":
            raise AdapterMismatch(
                f"{path}: {name} is {piece.get_dtype()} {piece.get_shape()}; a model with {width} values a token needs "
                f"F32 {shapes[kind][part == 'bias']}"
            )
        if not 0 < int(block) < base.blocks:
            raise AdapterMismatch(
                f"{path}: {name} is for a block that this model of {base.blocks} blocks does not have"
            )
        found[kind].add(int(block))
    for kind, blocks in found.items():
        for block in blocks:
            for part in ("weight", "bias"):
                if f"{kind}.{block}.{part}" not in names:
                    raise AdapterError(f"{path}: {kind}.{block}.{part} is missing")
    return StoredExits(path, base, frozenset(found["lens"]), frozenset(found["classifier"]))


def _read(stored: safe_open, header: StoredExits, blocks: Container[int]) -> TrainedExits:
    def tensor(name: str) -> torch.Tensor:
        value: torch.Tensor = stored.get_tensor(name)
        if not bool(value.isfinite().all()):
            raise AdapterError(f"{header.path}: {name} holds NaN or infinity")
        return value

    lenses = {
        b: ExitLens(tensor(f"lens.{b}.weight"), tensor(f"lens.{b}.bias")) for b in sorted(header.lenses) if b in blocks
    }
    classifiers = {
        b: ExitClassifier(tensor(f"classifier.{b}.weight"), tensor(f"classifier.{b}.bias"))
        for b in sorted(header.classifiers)
        if b in blocks
    }
    return TrainedExits(header.base, lenses, classifiers)
