"""What a model's files consist of, with digests of every byte.

A model is shared in *parts*: each block, the client's part (embeddings, final norm, head), and its files of JSON. A
part's manifest lists its *items* (tensors, or files) with their digests, and the digest of the manifest stands for the
whole part: a peer that trusts it can take the part from any other.

The digest of an item is a tree of height two: the digests of its chunks, hashed once more. So each chunk is checked
when it arrives, and it is known which peer sent a wrong one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec

from swarm.errors import ProtocolViolation
from swarm.models.checkpoints.checkpoint import MAX_TENSOR_NAME_CHARACTERS
from swarm.models.checkpoints.config_limits import MAX_BLOCKS
from swarm.models.checkpoints.safetensors_header import size_of
from swarm.protocol.messages.peers import PART_PATTERN

FILES, CLIENT = "files", "client"
"""The parts that are not blocks. The part of a block is its number."""

CHUNK_BYTES = 1 << 20
"""What is asked for, sent and checked at once. A chunk takes 9 ms on a link of 1 Gbit/s."""

DIGEST_BYTES = 32
MAX_ITEMS = 1 << 14
MAX_MANIFEST_BYTES = 4 << 20
MAX_ITEM_BYTES = 1 << 40

_DOMAIN = b"swarm part 1\n"
_FILE = ""
"""The dtype of an item that is a file."""

Sha256 = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Item(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor or a file.

    Attributes:
        name: of the tensor in the checkpoint, or of the file.
        dtype: safetensors' name; "" for a file.
        size: bytes.
        digest: of the digests of its chunks.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TENSOR_NAME_CHARACTERS)]
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 48)], ...], msgspec.Meta(max_length=16)]
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_ITEM_BYTES)]
    digest: Sha256

    @property
    def chunks(self) -> int:
        """Number of its chunks; the last one may be shorter."""
        return -(-self.size // CHUNK_BYTES)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Offset inside the item, and length, of one chunk."""
        offset = chunk * CHUNK_BYTES
        return offset, min(CHUNK_BYTES, self.size - offset)


_decoder = msgspec.msgpack.Decoder(Annotated[tuple[Item, ...], msgspec.Meta(max_length=MAX_ITEMS)])


@dataclass(frozen=True)
class PartManifest:
    """The items of one part, in the order in which they lie in its file."""

    items: tuple[Item, ...]

    @cached_property
    def encoded(self) -> bytes:
        """What travels, and what the digest covers."""
        return msgspec.msgpack.encode(self.items)

    @cached_property
    def digest(self) -> str:
        """Stands for the part: 64 hex digits."""
        return hashlib.sha256(_DOMAIN + self.encoded).hexdigest()

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all items."""
        return sum(item.size for item in self.items)

    @classmethod
    def decode(cls, part: str, data: bytes | memoryview) -> PartManifest:
        """A manifest that another peer sent. Raises `ProtocolViolation` if it is none, or none of such a part."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise ProtocolViolation(f"a manifest of {len(data)} bytes is too large; at most {MAX_MANIFEST_BYTES}")
        try:
            found = _decoder.decode(data)
            problem = _problem(part, found)
        except (msgspec.MsgspecError, ValueError) as error:
            problem = str(error)
        if problem:
            raise ProtocolViolation(f"not a manifest of part {part}: {problem}")
        return cls(found)


def _problem(part: str, items: Sequence[Item]) -> str:
    if len({item.name for item in items}) < len(items):
        return "a name occurs twice"
    if part == FILES:
        return next((f"{item.name[:64]!r} is no file" for item in items if item.dtype != _FILE or item.shape), "")
    return next(
        (f"the size of {item.name[:64]!r} does not follow" for item in items if item.size != _tensor_size(item)), ""
    )


def _tensor_size(item: Item) -> int:
    return size_of(item.dtype, item.shape)


@dataclass(frozen=True)
class ModelManifest:
    """The manifests of a model's parts, as far as they are known.

    Attributes:
        model, revision: see `Checkpoint`.
        blocks: of the whole model.
        parts: by the part's name.
    """

    model: str
    revision: str
    blocks: int
    parts: Mapping[str, PartManifest]

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each part."""
        return {part: manifest.digest for part, manifest in self.parts.items()}

    def size_bytes(self, parts: Iterable[str]) -> int:
        """Bytes of these parts."""
        return sum(self.parts[part].size_bytes for part in parts)


def all_parts(blocks: int) -> tuple[str, ...]:
    """The names of all parts of a model."""
    return (FILES, CLIENT, *map(str, range(blocks)))


def parts_of_blocks(start: int, end: int) -> tuple[str, ...]:
    """What a server of blocks [start, end) needs."""
    return (FILES, *map(str, range(start, end)))


def is_part(name: str, blocks: int = MAX_BLOCKS) -> bool:
    """Whether a model of so many blocks has this part."""
    return re.match(PART_PATTERN, name) is not None and (not name.isdigit() or int(name) < blocks)


def item_digest(chunk_digests: bytes | bytearray | memoryview) -> bytes:
    """The digest of an item, from those of its chunks, one behind the other."""
    return hashlib.sha256(chunk_digests).digest()


def chunk_digest(data: bytes | memoryview) -> bytes:
    """The digest of one chunk."""
    return hashlib.sha256(data).digest()
