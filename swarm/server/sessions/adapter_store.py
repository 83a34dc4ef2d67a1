"""The adapters that a server keeps for its peers.

Rules:
- An adapter belongs to the peer that sent it, which names a block's part by its digest. No peer finds the adapters of
  another. Those that the server was started with are found by every peer.
- Parts that have not been used for a while are dropped. So are the least recently used ones if a peer or all peers
  exceed their memory, or if a peer has more than a few versions of one block's part: training makes one with each step.
- Sessions and requests keep their parts for as long as they need them. These count too.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.common.dtypes import HIDDEN_DTYPES
from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import AdapterRefused, CacheFull, NotEnoughMemory, UnknownAdapter, WrongShape
from swarm.metrics.server import ServerObserver
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.models.adapters.block_adapter import BlockAdapterWeights
from swarm.protocol.adapter_encoding import count_values, pack_adapters
from swarm.protocol.framing import MAX_PAYLOAD_BYTES
from swarm.protocol.messages import BlockAdapterSpec, PutAdapters

PART_OVERHEAD_BYTES = 1 << 10
"""Bytes that each part counts in addition to its values, so that many tiny ones are not free."""


@dataclass(frozen=True)
class AdapterLimits:
    """How much the adapters of clients may take.

    Attributes:
        rank: largest rank of LoRA factors.
        memory: bytes of all adapters.
        peer_share: share of the memory that one peer may take.
        versions: versions of one block's part that are kept for a peer.
        seconds: after which unused parts are dropped.
    """

    rank: int = 256
    memory: int = 1 << 30
    peer_share: float = 0.5
    versions: int = 4
    seconds: float = 600.0

    @property
    def peer_memory(self) -> int:
        """Bytes that the adapters of one peer may take."""
        return min(int(self.memory * self.peer_share), MAX_PAYLOAD_BYTES)


_Key = tuple[str, int, bytes]
"""Peer, block, digest."""

_Reference = tuple[weakref.ref[BlockAdapterWeights], int]
"""A part that may have been freed, and its bytes."""


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
        observer: is told how much is kept.
    """

    now: Callable[[], float]
    limits: AdapterLimits = field(default_factory=AdapterLimits)
    observer: ServerObserver = field(default_factory=ServerObserver)
    _kept: dict[_Key, _StoredPart] = field(default_factory=dict)
    """Least recently used first."""
    _sizes: Counter[str] = field(default_factory=Counter)
    """Bytes of the parts that are kept, by peer."""
    _dropped: dict[str, list[_Reference]] = field(default_factory=dict)
    """By peer: parts that were dropped but may still be in use."""
    _public: dict[tuple[int, bytes], BlockAdapterWeights] = field(default_factory=dict)
    _public_bytes: int = 0

    def __len__(self) -> int:
        return len(self._kept)

    def validate_size(self, message: PutAdapters, hidden_size: int) -> None:
        """Raise `AdapterRefused` for a rank or a size beyond the limits, before the payload is decoded."""
        size = 0
        for block in filter(None, message.blocks):
            rank = max((one.rank for one in block.modules), default=0)
            if rank > self.limits.rank:
                raise AdapterRefused(f"the adapter has rank {rank}; this server takes up to {self.limits.rank}")
            size += _size(block, hidden_size, message.dtype)
        if size > self.limits.peer_memory:
            raise AdapterRefused(
                f"the adapter takes {format_bytes(size)}; "
                f"this server takes up to {format_bytes(self.limits.peer_memory)} from a peer"
            )

    def store(self, peer: str, parts: Mapping[tuple[int, bytes], BlockAdapterWeights]) -> None:
        """Keep parts, by block and digest, which have been validated against their blocks.

        Raises `CacheFull` if sessions of this peer, or of all peers together, use so much memory that they do not fit.
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
        if not self._drop_until(own, lambda: self._memory_of_peer(peer) + needed <= self.limits.peer_memory):
            raise CacheFull(
                f"sessions of this peer hold {format_bytes(self._memory_of_peer(peer))} of adapters, of the "
                f"{format_bytes(self.limits.peer_memory)} that a peer may have; close some, or ask another server"
            )
        others = [key for key in self._kept if key not in known]
        room = self.limits.memory - self._public_bytes
        if not self._drop_until(others, lambda: self.memory + needed <= room):
            raise CacheFull("all memory for adapters is in use; ask another server, or try again later")
        self._kept.update(new)
        self._sizes[peer] += needed
        self._drop_old_versions(peer)
        self._report()

    def find(self, peer: str, span: Span, digests: Sequence[bytes] | None) -> AdapterWeights:
        """The parts that these digests, one for each block of the span, name for this peer.

        Raises:
            UnknownAdapter: one of them is not kept.
            WrongShape: there are more or fewer digests than blocks.
        """
        if digests is None:
            return NO_ADAPTER
        if len(digests) != span.length:
            raise WrongShape(f"{len(digests)} adapters are named for the {span.length} blocks {span}")
        named = {block: digest for block, digest in enumerate(digests, span.start) if digest}
        return {block: self._part(peer, block, digest) for block, digest in named.items()}

    def value_count(self, peer: str, start: int, digests: Sequence[bytes] | None) -> int:
        """Values of the parts that these digests name, of the blocks from `start` on; unknown ones have none."""
        found = 0
        for block, digest in enumerate(digests or (), start):
            kept = self._kept.get((peer, block, digest))
            part = self._public.get((block, digest)) or (kept.part if kept is not None else None)
            found += sum(tensor.numel() for tensor in part.tensors) if part is not None else 0
        return found

    def add_public(self, parts: AdapterWeights) -> None:
        """Keep validated parts for every peer, for as long as this server holds its blocks.

        Raises `NotEnoughMemory` if they take more than all adapters may.
        """
        self._public_bytes += sum(map(_bytes, parts.values()))
        if self._public_bytes > self.limits.memory:
            raise NotEnoughMemory(
                f"the adapters of --adapters take {format_bytes(self._public_bytes)}, and all adapters together may "
                f"take {format_bytes(self.limits.memory)}"
            )
        for block, part in parts.items():
            dtypes = {tensor.dtype for tensor in part.tensors}
            assert len(dtypes) == 1, "a part travels in one dtype"
            (described,), _ = pack_adapters([part], dtypes.pop())
            self._public[block, described.digest] = part

    def expire(self) -> None:
        """Drop parts that have not been used for a while."""
        now = self.now()
        for key in [key for key, one in self._kept.items() if now - one.used > self.limits.seconds]:
            self._drop(key)
        self._dropped = {peer: alive for peer, left in self._dropped.items() if (alive := _alive(left))}
        self._report()

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._sizes.clear()
        self._dropped.clear()
        self._public.clear()
        self._public_bytes = 0
        self._report()

    @property
    def memory(self) -> int:
        """Bytes of all peers' adapters in memory, whether kept or only in use."""
        return self._sizes.total() + sum(map(_alive_bytes, self._dropped.values()))

    def _report(self) -> None:
        self.observer.adapter_total(self.memory)

    def _part(self, peer: str, block: int, digest: bytes) -> BlockAdapterWeights:
        public = self._public.get((block, digest))
        if public is not None:
            return public
        key = peer, block, digest
        if key not in self._kept:
            raise UnknownAdapter(
                f"the adapter {digest.hex()} of block {block} is not (or no longer) kept here; send it again"
            )
        return self._touch(key)

    def _touch(self, key: _Key) -> BlockAdapterWeights:
        """Mark a part as used now."""
        one = self._kept.pop(key)
        one.used = self.now()
        self._kept[key] = one  # after all others
        return one.part

    def _drop_until(self, candidates: Sequence[_Key], enough: Callable[[], bool]) -> bool:
        """Drop candidates, in order, until `enough` says so. False if dropping all was not enough."""
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
        self._dropped.setdefault(peer, []).append((weakref.ref(one.part), one.size))

    def _drop_old_versions(self, peer: str) -> None:
        versions: defaultdict[int, list[_Key]] = defaultdict(list)
        for key in self._kept:
            if key[0] == peer:
                versions[key[1]].append(key)
        for keys in versions.values():
            for key in keys[: -self.limits.versions]:
                self._drop(key)

    def _memory_of_peer(self, peer: str) -> int:
        """Bytes of one peer's adapters in memory."""
        return self._sizes[peer] + _alive_bytes(self._dropped.get(peer, ()))


def _alive(left: Sequence[_Reference]) -> list[_Reference]:
    return [one for one in left if one[0]() is not None]


def _alive_bytes(left: Sequence[_Reference]) -> int:
    return sum(size for _, size in _alive(left))


def _bytes(part: BlockAdapterWeights) -> int:
    return PART_OVERHEAD_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in part.tensors)


def _size(block: BlockAdapterSpec, hidden_size: int, dtype: str) -> int:
    """What `_bytes` will be for a part with this description. An unknown dtype is refused later."""
    return PART_OVERHEAD_BYTES + count_values(block, hidden_size) * (
        HIDDEN_DTYPES[dtype].itemsize if dtype in HIDDEN_DTYPES else 1
    )
