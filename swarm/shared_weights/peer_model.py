"""A model of which this machine has nothing but what peers send it: who shares it, what is believed, and its files."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError

from swarm.common import console
from swarm.common.units import format_bytes
from swarm.data_structures import ModelInfo, ServerInfo, ServerState
from swarm.dht.directory import fetch_models, fetch_servers
from swarm.errors import DhtError, ProtocolViolation, RemoteError, WeightsUnavailable
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.shared_weights.fetcher import FetchProgress, FindHolders, OpenStream, fetch_parts
from swarm.shared_weights.holder_stream import HolderStream, offers
from swarm.shared_weights.manifest import FILES, all_parts
from swarm.shared_weights.part_store import PartStore, default_root, file_name
from swarm.shared_weights.trust import TrustedParts, agree, pinned_path, trusted_at_first_use, trusted_by_file
from swarm.transport.p2p import Peer

logger = logging.getLogger(__name__)

REFRESH_S = 10.0
"""How long an answer of the DHT is used."""


class SharersOfModel:
    """Looks for servers that share the weights of one model.

    Args:
        peer: this peer.
        model: its name in the swarm.
        blocks: number of its blocks.
    """

    def __init__(self, peer: Peer, model: str, blocks: int) -> None:
        self._peer, self._model, self._blocks = peer, model, blocks
        self._found: list[str] = []
        self._found_at = float("-inf")

    async def find(self) -> Sequence[str]:
        """Their peer ids, in an order that spreads those who ask. If the DHT does not answer, those known before."""
        if not self._found or time.monotonic() - self._found_at >= REFRESH_S:
            try:
                servers = await fetch_servers(self._peer.dht, self._model, self._blocks)
            except DhtError:
                return self._found
            self._found = sharers(servers, self._peer.peer_id, random.Random())
            self._found_at = time.monotonic()
        return self._found


def sharers(servers: Sequence[ServerInfo], own_id: str, chance: random.Random) -> list[str]:
    """The servers that share weights, but for this peer, shuffled. Pure."""
    found = [
        one.peer_id
        for one in servers
        if one.shares_weights and one.peer_id != own_id and one.state is not ServerState.OFFLINE
    ]
    chance.shuffle(found)
    return found


async def find_model(peer: Peer, name: str) -> ModelInfo:
    """What the swarm says of a model. Raises `WeightsUnavailable` if no peer serves it, or `DhtError`."""
    models = await fetch_models(peer.dht)
    found = next((one for one in models if one.name == name), None)
    if found is None:
        there = ", ".join(one.name for one in models[:5])
        raise WeightsUnavailable(
            f"no server of this swarm serves {name}, so its weights cannot be had from peers"
            + (f". It serves {there}: give one of these names" if there else "")
        )
    return found


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
        self._stored: dict[str, tuple[str, int]] = {}
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
            found,
            fetch=opened._fetch,
            parts=replace(found.parts, weight_map=opened._weight_map, stored=opened._stored),
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
        for part, manifest in self._store.manifests.items():
            if part != FILES:
                self._stored.update((item.name, (item.dtype, item.size)) for item in manifest.items)

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
        with closing(HolderStream(await self._open_stream(holder))) as stream:
            found = await stream.find(self._store.model, self._store.revision)
            offered = offers(found.digests, self._store.digests)
            for part in wanted:
                if part in offered:
                    await asyncio.to_thread(self._store.add_manifest, part, await stream.manifest(part))

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


async def open_from_peers(
    peer: Peer,
    model: str,
    *,
    revision: str | None = None,
    digests: str | Path | None = None,
    believe_first: bool = False,
    cache_dir: Path | None = None,
) -> PeerModel:
    """A model whose files and weights come from servers of the swarm.

    Args:
        peer: this peer, which has joined the swarm.
        model: its name in the swarm.
        revision: None for the one that servers have.
        digests: file of `swarm digest --for-peers`, which says what the weights must be.
        believe_first: whether to believe what all servers that are met say, if there is no such file.
        cache_dir: where weights are kept; None for this user's cache.

    Raises:
        WeightsUnavailable: no server shares the model, or nothing says what its weights must be.
        UnknownWeights: servers disagree about them.
        DigestFileError: the file cannot be used.
        NotEnoughSpace, ModelNotFound, CheckpointError, UnsupportedModel: what was received cannot be kept or used.
        DhtError: the DHT did not answer.
    """
    trusted = None
    if digests is not None:
        trusted = await asyncio.to_thread(trusted_by_file, model, Path(digests), revision)
    elif not believe_first:
        raise WeightsUnavailable(
            f"nothing says what the weights of {model} must be, so they are taken from no peer: give a file of "
            "`swarm digest MODEL --for-peers > FILE`, made where all weights are: --digests FILE"
        )
    there = await find_model(peer, model)
    sharers = SharersOfModel(peer, model, there.blocks)

    async def learn() -> TrustedParts:
        if trusted is not None:
            return trusted
        path = pinned_path(model, revision)
        return await trusted_at_first_use(model, revision, peer.open_weights_stream, sharers.find, path)

    return await PeerModel.open(model, learn, peer.open_weights_stream, sharers.find, cache_dir)
