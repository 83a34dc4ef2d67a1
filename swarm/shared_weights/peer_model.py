"""A model of which this machine has nothing but what peers send it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError

from swarm.common import console
from swarm.common.units import format_bytes
from swarm.errors import ProtocolViolation, RemoteError, WeightsUnavailable
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.shared_weights.fetcher import FetchProgress, FindHolders, OpenStream, fetch_parts
from swarm.shared_weights.holder_stream import HolderStream, offers
from swarm.shared_weights.manifest import FILES, all_parts
from swarm.shared_weights.part_store import PartStore, default_root, file_name
from swarm.shared_weights.trust import TrustedParts, agree

logger = logging.getLogger(__name__)

LearnDigests = Callable[[], Awaitable[TrustedParts]]


class PeerModel:
    """A model whose parts are received when they are needed, and kept for the next start. Made by `open`.

    Attributes:
        checkpoint: its files arrive when they are read, which must happen in a thread, not in the event loop.
    """

    def __init__(
        self, store: PartStore, learn_digests: LearnDigests, open_stream: OpenStream, find_holders: FindHolders
    ) -> None:
        self._store = store
        self._learn_digests = learn_digests
        self._open_stream, self._find_holders = open_stream, find_holders
        self._loop = asyncio.get_running_loop()
        self._receiving = asyncio.Lock()
        self._liars: set[str] = set()
        self._weight_map: dict[str, str] = {}
        self.checkpoint: Checkpoint

    @classmethod
    async def open(
        cls,
        model: str,
        learn_digests: LearnDigests,
        open_stream: OpenStream,
        find_holders: FindHolders,
        cache_dir: Path | None = None,
    ) -> PeerModel:
        """Receive the model's files, and what its parts consist of.

        Args:
            model: its name in the swarm.
            learn_digests: says what its parts must be; asked again for parts about which it had said nothing.
            open_stream, find_holders: see `fetch_parts`.
            cache_dir: where parts are kept; None for this user's cache.

        Raises as `fetch_parts`, as `open_checkpoint`, and what `learn_digests` raises.
        """
        trusted = await learn_digests()
        root = default_root(cache_dir)
        store = await asyncio.to_thread(PartStore.open, root, model, trusted.revision, trusted.blocks, trusted.digests)
        opened = cls(store, learn_digests, open_stream, find_holders)
        await opened.require([FILES])
        await opened._get_manifests()
        found = await asyncio.to_thread(open_checkpoint, store.folder)
        assert found.parts is not None
        opened._note_tensors()
        opened.checkpoint = replace(
            found, fetch=opened._fetch, parts=replace(found.parts, weight_map=opened._weight_map)
        )
        return opened

    @property
    def received(self) -> Checkpoint:
        """The checkpoint as it is on this machine now; it gets nothing more from peers."""
        return open_checkpoint(self._store.folder)

    async def require(self, parts: Sequence[str]) -> None:
        """Receive the parts that are not here yet. Raises as `fetch_parts`."""
        async with self._receiving:
            missing = await asyncio.to_thread(self._store.missing, parts)
            if not missing:
                return
            if any(part not in self._store.digests for part in missing):
                store = self._store
                known = TrustedParts(store.revision, store.blocks, store.digests)
                store.digests.update(agree(store.model, [known, await self._learn_digests()]).digests)
            size = sum(self._store.manifests[one].size_bytes for one in missing if one in self._store.manifests)
            title = f"Receiving weights of {self._store.model}" if size else None
            with console.progress_bar(title, size, "B") as bar:
                shown = 0

                def show(progress: FetchProgress) -> None:
                    nonlocal shown
                    bar.update(progress.done_bytes - shown)
                    shown = progress.done_bytes

                await fetch_parts(self._open_stream, self._find_holders, self._store, missing, show, liars=self._liars)
            self._note_tensors()
            if size:
                logger.info("Received %s of weights from peers", format_bytes(size))

    def _note_tensors(self) -> None:
        self._weight_map.update(self._store.weight_map)

    async def _get_manifests(self) -> None:
        """Learn what the other parts consist of, as far as peers that are there now say."""
        wanted = [part for part in all_parts(self._store.blocks) if part in self._store.digests]
        for holder in await self._find_holders():
            missing = [part for part in wanted if part not in self._store.manifests]
            if not missing:
                return
            if holder in self._liars:
                continue
            try:
                await self._get_manifests_from(holder, missing)
            except RemoteError as error:
                if isinstance(error, ProtocolViolation):
                    self._liars.add(holder)
                logger.debug("peer …%s: %s", holder[-6:], error)

    async def _get_manifests_from(self, holder: str, wanted: Iterable[str]) -> None:
        stream = HolderStream(await self._open_stream(holder))
        try:
            found = await stream.find(self._store.model, self._store.revision)
            offered = offers(found.digests, self._store.digests)
            for part in wanted:
                if part in offered:
                    await asyncio.to_thread(self._store.add_manifest, part, await stream.manifest(part))
        finally:
            stream.close()

    def _fetch(self, file: str) -> Path:
        """`Checkpoint.fetch`: a part's file is received if it is missing."""
        part = next((one for one in self._store.manifests if one != FILES and file_name(one) == file), None)
        if part is not None and not self._store.path(part).exists():
            if _is_in(self._loop):
                raise WeightsUnavailable(f"{file} is not here yet")  # the loop cannot wait for itself
            asyncio.run_coroutine_threadsafe(self.require([part]), self._loop).result()
        path = self._store.folder / file
        if not path.is_file():
            raise EntryNotFoundError(file)
        return path


def _is_in(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
