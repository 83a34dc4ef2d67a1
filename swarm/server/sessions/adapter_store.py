"""The adapters that a server keeps for its peers.

Laws:
- An adapter belongs to the peer that sent it, who names a block's part by its digest. Nobody finds another's, nor
  learns whether it is there. What the server itself was started with is found by everybody.
- What nobody has used for a while leaves. So does what was used longest ago, where a peer or all together have more
  than their room, or a peer more than a few versions of a block's part: training makes a new one with every step.
- Sessions and requests that are under way hold theirs as long as they need them, and these count as well.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import AdapterRefused, CacheFull, UnknownAdapter, WrongShape
from swarm.metrics.server import ServerObserver
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.protocol.adapter_encoding import BlockAdapterWeights, count_values, pack_adapters
from swarm.protocol.compression import HIDDEN_DTYPES
from swarm.protocol.framing import MAX_PAYLOAD_BYTES
from swarm.protocol.messages import BlockAdapterSpec, PutAdapters

PART_OVERHEAD_BYTES = 1 << 10
"""Bytes that a part counts beyond its numbers, so that many tiny ones are not for free."""


@dataclass(frozen=True)
class AdapterLimits:
    """Attributes:
    rank: of LoRA factors, at most.
    memory: bytes of all adapters.
    peer_share: of this, that one peer may take.
    versions: of one block's part, that are kept for a peer.
    seconds: after which what was not used leaves.
    """

    rank: int = 256
    memory: int = 1 << 30
    peer_share: float = 0.5
    versions: int = 4
    seconds: float = 600.0

    @property
    def peer_memory(self) -> int:
        """Bytes of one peer's adapters."""
        return min(int(self.memory * self.peer_share), MAX_PAYLOAD_BYTES)


_Key = tuple[str, int, bytes]
"""Peer, block, digest."""

_Reference = tuple[weakref.ref[BlockAdapterWeights], int]
"""A part that may be gone, and its bytes."""


@dataclass
class _StoredPart:
    part: BlockAdapterWeights
    size: int
    used: float


@dataclass
class AdapterStore:
    """The adapters of one server.

    Attributes:
        now: clock in seconds.
        observer: hears how much is kept.
    """

    now: Callable[[], float]
    limits: AdapterLimits = field(default_factory=AdapterLimits)
    observer: ServerObserver = field(default_factory=ServerObserver)
    _kept: dict[_Key, _StoredPart] = field(default_factory=dict)
    """Least recently used first."""
    _sizes: Counter[str] = field(default_factory=Counter)
    """Bytes of what is kept, by peer."""
    _left: dict[str, list[_Reference]] = field(default_factory=dict)
    """By peer: what left, but may be held by somebody."""
    _public: dict[tuple[int, bytes], BlockAdapterWeights] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    def check(self, message: PutAdapters, hidden_size: int) -> None:
        """Raise `AdapterRefused` for a rank or a size that is not taken, before anything is made of the payload."""
        size = 0
        for block in filter(None, message.blocks):
            rank = max((one.rank for one in block.modules), default=0)
            if rank > self.limits.rank:
                raise AdapterRefused(f"the adapter has rank {rank}; this server takes up to {self.limits.rank}")
            size += _size(block, hidden_size, message.dtype)
        if size > self.limits.peer_memory:
            raise AdapterRefused(
                f"the adapter takes {format_bytes(size)}; "
                f"this server takes up to {format_bytes(self.limits.peer_memory)} of a peer"
            )

    def put(self, peer: str, parts: Mapping[tuple[int, bytes], BlockAdapterWeights]) -> None:
        """Keep parts, by block and digest; they have been checked against their blocks.

        Raises `CacheFull` where sessions, of this peer or of all together, hold so much that there is no room for them.
        """
        self.expire()
        new: dict[_Key, _StoredPart] = {}
        known: set[_Key] = set()
        for (block, digest), part in parts.items():
            key = peer, block, digest
            if key in self._kept:
                self._touch(key)
                known.add(key)
            else:
                new[key] = _StoredPart(part, _bytes(part), self.now())
        needed = sum(one.size for one in new.values())
        own = [key for key in self._kept if key[0] == peer and key not in known]
        if not self._make_room(own, lambda: self._held(peer) + needed <= self.limits.peer_memory):
            raise CacheFull(
                f"sessions of this peer hold {format_bytes(self._held(peer))} of adapters, of the "
                f"{format_bytes(self.limits.peer_memory)} that a peer may have; close some, or ask another server"
            )
        others = [key for key in self._kept if key not in known]
        if not self._make_room(others, lambda: self.memory + needed <= self.limits.memory):
            raise CacheFull("all room for adapters is in use; ask another server, or again later")
        self._kept.update(new)
        self._sizes[peer] += needed
        self._drop_old_versions(peer)
        self._tell()

    def find(self, peer: str, span: Span, digests: Sequence[bytes] | None) -> AdapterWeights:
        """What these digests, one a block of the span, name for this peer.

        Raises:
            UnknownAdapter: one of them is not here.
            WrongShape: there are more or fewer digests than blocks.
        """
        if digests is None:
            return NO_ADAPTER
        if len(digests) != span.length:
            raise WrongShape(f"{len(digests)} adapters are named for the {span.length} blocks {span}")
        named = {block: digest for block, digest in enumerate(digests, span.start) if digest}
        return {block: self._part(peer, block, digest) for block, digest in named.items()}

    def add_public(self, parts: AdapterWeights) -> None:
        """Keep parts for everybody, as long as this server has its blocks; they have been checked."""
        for block, part in parts.items():
            dtypes = {tensor.dtype for tensor in part.tensors}
            assert len(dtypes) == 1, "a part travels in one dtype"
            (described,), _ = pack_adapters([part], dtypes.pop())
            self._public[block, described.digest] = part

    def expire(self) -> None:
        """Let go what nobody has used for a while."""
        now = self.now()
        for key in [key for key, one in self._kept.items() if now - one.used > self.limits.seconds]:
            self._drop(key)
        self._left = {peer: alive for peer, left in self._left.items() if (alive := _alive(left))}
        self._tell()

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._sizes.clear()
        self._left.clear()
        self._public.clear()
        self._tell()

    @property
    def memory(self) -> int:
        """Bytes of all peers' adapters that are here, known by name or only held by somebody."""
        return self._sizes.total() + sum(map(_alive_bytes, self._left.values()))

    def _tell(self) -> None:
        self.observer.adapter_totals(len(self), self.memory)

    def _part(self, peer: str, block: int, digest: bytes) -> BlockAdapterWeights:
        public = self._public.get((block, digest))
        if public is not None:
            return public
        key = peer, block, digest
        if key not in self._kept:
            raise UnknownAdapter(f"the adapter {digest.hex()} of block {block} is not here (any more); send it again")
        return self._touch(key)

    def _touch(self, key: _Key) -> BlockAdapterWeights:
        """It is used."""
        one = self._kept.pop(key)
        one.used = self.now()
        self._kept[key] = one  # behind all others
        return one.part

    def _make_room(self, candidates: Sequence[_Key], enough: Callable[[], bool]) -> bool:
        """Drop candidates, in order, until there is enough room."""
        for key in candidates:
            if enough():
                return True
            self._drop(key)
        return enough()

    def _drop(self, key: _Key) -> None:
        peer, one = key[0], self._kept.pop(key)
        self._sizes[peer] -= one.size
        if not self._sizes[peer]:
            del self._sizes[peer]
        self._left.setdefault(peer, []).append((weakref.ref(one.part), one.size))

    def _drop_old_versions(self, peer: str) -> None:
        versions: defaultdict[int, list[_Key]] = defaultdict(list)
        for key in self._kept:
            if key[0] == peer:
                versions[key[1]].append(key)
        for keys in versions.values():
            for key in keys[: -self.limits.versions]:
                self._drop(key)

    def _held(self, peer: str) -> int:
        """Bytes of a peer's adapters."""
        return self._sizes[peer] + _alive_bytes(self._left.get(peer, ()))


def _alive(left: Sequence[_Reference]) -> list[_Reference]:
    return [one for one in left if one[0]() is not None]


def _alive_bytes(left: Sequence[_Reference]) -> int:
    return sum(size for _, size in _alive(left))


def _bytes(part: BlockAdapterWeights) -> int:
    return PART_OVERHEAD_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in part.tensors)


def _size(block: BlockAdapterSpec, hidden_size: int, dtype: str) -> int:
    """What `_bytes` will be of a part that is described like this; an unknown dtype is refused later."""
    return PART_OVERHEAD_BYTES + count_values(block, hidden_size) * (
        HIDDEN_DTYPES[dtype].itemsize if dtype in HIDDEN_DTYPES else 1
    )
