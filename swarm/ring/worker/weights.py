"""A worker's weights: received from its starter and from other workers, kept in its folder, and held for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import WeightsNotShared
from swarm.protocol import messages
from swarm.protocol.messages import Assign
from swarm.transport.p2p import Peer
from swarm.transport.stream import Stream

if TYPE_CHECKING:  # transformers, which takes 110 MB, is imported when there is something to receive
    from swarm.shared_weights.fetcher import FetchProgress
    from swarm.shared_weights.holder import WeightsHolder

READING_WEIGHTS = "swarm.shared_weights.checkpoint_parts"
"""What is imported then, in a thread, because that takes seconds."""


class WorkerWeights:
    """What a worker keeps of models. It answers only the peers that its assignment names.

    Args:
        root: folder of all models.
        digests: folder for digests that were computed.
        peer: its place in the network.
    """

    def __init__(self, root: Path, digests: Path, peer: Peer) -> None:
        self._root = root
        self._digests = digests
        self._peer = peer
        self._holders: tuple[str, ...] = ()
        self._holder: WeightsHolder | None = None
        self._preparing: asyncio.Task[None] | None = None

    def know(self, assignment: Assign) -> None:
        """Receive from these holders from now on, and answer them."""
        self._holders = tuple(one.peer_id for one in assignment.holders)
        for one in assignment.holders:
            self._peer.learn_addresses(one.peer_id, one.addresses)

    async def receive(self, assignment: Assign, on_progress: Callable[[int, int], None]) -> Path:
        """Receive what is missing for an assignment; the folder of a model that holds at least its blocks.

        Args:
            on_progress: called with bytes received, and asked for.

        Raises:
            WeightsUnavailable: no holder has them, or the folder cannot be written.
            NotEnoughSpace: they do not fit on the drive.
            ModelNotFound, UnsupportedModel: the files that came are of no model that can be served.
        """
        self.know(assignment)
        await asyncio.to_thread(import_module, READING_WEIGHTS)
        from swarm.shared_weights.fetcher import fetch_parts
        from swarm.shared_weights.manifest import parts_of_blocks
        from swarm.shared_weights.part_store import PartStore

        digests = {part: digest.hex() for part, digest in assignment.digests.items()}
        model = assignment.model, assignment.revision, assignment.blocks
        store = await asyncio.to_thread(PartStore.open, self._root, *model, digests)
        parts = parts_of_blocks(assignment.start, assignment.end)
        held = await asyncio.to_thread(lambda: store.held)  # which looks at the file of each part
        kept = sum(store.manifests[part].size_bytes for part in parts if part in held)

        def note(now: FetchProgress) -> None:
            on_progress(kept + now.done_bytes, assignment.total_bytes)

        await fetch_parts(self._peer.open_weights_stream, self._find_holders, store, parts, note)
        await self._share(store.folder)
        return store.folder

    async def serve(self, stream: Stream) -> None:
        """Answer a peer that asks for weights. Raises `RemoteError`."""
        if self._holder is None or stream.peer_id not in self._holders:
            await stream.send(messages.refusal(WeightsNotShared("this worker holds no weights for you")))
            return
        await self._holder.serve(stream)

    def close(self) -> None:
        """Stop computing digests."""
        if self._preparing is not None:
            self._preparing.cancel()

    async def _find_holders(self) -> Sequence[str]:
        return self._holders

    async def _share(self, folder: Path) -> None:
        """Hold for others what is in the folder, from the moment that its digests are known."""
        from swarm.models.checkpoints.checkpoint import open_checkpoint
        from swarm.shared_weights.checkpoint_parts import CheckpointParts
        from swarm.shared_weights.holder import WeightsHolder

        checkpoint = await asyncio.to_thread(open_checkpoint, folder)
        self._holder = WeightsHolder(CheckpointParts(checkpoint, self._digests))
        self.close()
        self._preparing = asyncio.create_task(self._holder.prepare())
