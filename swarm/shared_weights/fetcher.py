"""Receives parts of a model from several peers at once, into a store.

Each peer that shares parts gets a stream and a few requests at a time; whichever is quicker gets more. A chunk that did
not come, or is not right, is asked for elsewhere. A peer that sends a wrong chunk is asked for nothing more. Read
`_Fetch` first: `HolderChoice` says which peers are asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

from swarm.errors import (
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    TooManyDownloads,
    WeightsNotShared,
    WeightsUnavailable,
)
from swarm.shared_weights.holder_stream import HolderStream, offers
from swarm.shared_weights.part_store import Chunk, PartStore, UnfinishedPart
from swarm.transport.stream import Stream

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""After this time a peer that failed is asked again, and others are looked for."""

STALLED_S = 30.0
"""A peer that has sent nothing that it was asked for is given up after this time if there are others, which then get
its room and its chunks. A chunk takes 17 s on an uplink of 0.5 Mbit/s."""


class HolderChoice:
    """The peers that may be asked for weights, and what is known of them. All times are seconds of one clock.

    Args:
        liars: peers that have sent wrong bytes, which are not asked; those that do are added.
    """

    def __init__(self, liars: set[str]) -> None:
        self._liars = liars
        self._known: list[str] = []
        self._useless: set[str] = set()
        """Peers that share none of the parts, or none that is still missing, or not this model."""
        self._retry_at: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._tried: set[tuple[str, str]] = set()
        """What was done with which peer since something came."""
        self._reasons: dict[str, str] = {}

    @property
    def possible(self) -> list[str]:
        """Those that have anything to give, in the order in which they were found."""
        return [one for one in self._known if one not in self._liars and one not in self._useless]

    @property
    def told(self) -> str:
        """Why peers gave nothing, in their words."""
        return "; ".join(dict.fromkeys(self._reasons.values()))

    def find(self, holders: Iterable[str]) -> None:
        """Note which peers there are, best first."""
        self._known = list(dict.fromkeys(holders))

    def to_ask(self, now: float) -> list[str]:
        """Those that can be asked now. Those that failed least come first, so that others get their turn."""
        ready = [one for one in self.possible if self._retry_at.get(one, now) <= now]
        return sorted(ready, key=lambda one: self._failures[one])

    def note_tried(self, holder: str, what: Literal["asked", "given up"]) -> bool:
        """A peer is asked, or makes room for others. Returns whether that is new since something came."""
        is_new = (holder, what) not in self._tried
        self._tried.add((holder, what))
        return is_new

    def note_progress(self) -> None:
        """Something came."""
        self._tried.clear()

    def note_end(self, holder: str) -> None:
        """A peer has given what it had."""
        self._useless.add(holder)

    def note_error(self, holder: str, error: RemoteError, now: float, is_stalled: bool = False) -> None:
        """A peer failed, refused, or lied."""
        self._reasons[holder] = str(error)
        if isinstance(error, WeightsNotShared):
            self._useless.add(holder)
        elif isinstance(error, ProtocolViolation):
            self._liars.add(holder)
        else:
            busy = RETRY_S * (2 if isinstance(error, TooManyDownloads) else 1)
            self._retry_at[holder] = now + (STALLED_S if is_stalled else busy)
            self._failures[holder] += 1

    def stalled(self, silent_s: Mapping[str, float]) -> Sequence[str]:
        """Of the peers that are asked now, those that are to be given up for others.

        Args:
            silent_s: for how many seconds each has not answered, though something is asked.
        """
        silent = [one for one, seconds in silent_s.items() if seconds > STALLED_S]
        untried = [one for one in self.possible if one not in silent_s and one not in self._retry_at]
        return silent if untried or len(silent) < len(silent_s) else ()


WINDOW = 4
"""Chunks that are under way from one peer. They cover a round trip of 320 ms on a link of 100 Mbit/s, and of 32 ms on
1 Gbit/s."""

MAX_HOLDERS = 4
"""Peers that are asked at the same time."""

NEXT_PART_CHUNKS = 2 * WINDOW
"""With fewer chunks than that to ask a peer for, the next part is begun, so that no round trip is waited for."""

NO_PROGRESS_S = 90.0
"""For so long nothing may come from any peer, and none be asked, or given up, for the first time since something came.
Longer than a peer has for one answer, so that others are asked for what it did not send."""

T = TypeVar("T")
OpenStream = Callable[[str], Awaitable[Stream]]
FindHolders = Callable[[], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class FetchProgress:
    """How far the parts that were asked for have come.

    Attributes:
        done_bytes: those that are here and right, also from an earlier attempt.
        total_bytes: of all parts whose size is known.
    """

    done_bytes: int
    total_bytes: int


async def fetch_parts(
    open_stream: OpenStream,
    find_holders: FindHolders,
    store: PartStore,
    parts: Sequence[str],
    on_progress: Callable[[FetchProgress], object] = lambda progress: None,
    liars: set[str] | None = None,
) -> None:
    """Receive the parts that the store lacks, in this order. What has come before is kept.

    Args:
        open_stream: opens a stream for weights to a peer. Raises `RemoteError`.
        find_holders: the ids of peers that may share parts, best first. Asked again while parts are missing.
        liars: peers that have sent wrong bytes, which are not asked; those that do are added.

    Raises:
        WeightsUnavailable: no peer shares what is missing, none has for `NO_PROGRESS_S`, or the store's folder cannot
            be used.
        NotEnoughSpace: the drive has no room for the parts.
    """
    missing = await asyncio.to_thread(store.missing, tuple(dict.fromkeys(parts)))
    if not missing:
        return
    untrusted = [part for part in missing if part not in store.digests]
    if untrusted:
        raise WeightsUnavailable(
            f"nothing says what part {untrusted[0]} of {store.model} must be, so it is taken from no peer: give a file "
            "of `swarm digest MODEL --for-peers` made where all weights are (--digests FILE)"
        )
    await _Fetch(open_stream, find_holders, store, missing, on_progress, liars if liars is not None else set()).run()


class _Fetch:
    """One call of `fetch_parts`."""

    def __init__(
        self,
        open_stream: OpenStream,
        find_holders: FindHolders,
        store: PartStore,
        parts: Sequence[str],
        on_progress: Callable[[FetchProgress], object],
        liars: set[str],
    ) -> None:
        self._open_stream, self._find_holders = open_stream, find_holders
        self._store, self._on_progress = store, on_progress
        self._parts = list(parts)
        self._not_begun = list(parts)
        self._unfinished: dict[str, UnfinishedPart] = {}
        self._left: Counter[str] = Counter()
        """Chunks of each begun part that have not arrived."""
        self._queue: deque[Chunk] = deque()
        """Those of them that are asked for nowhere."""
        self._changed = asyncio.Event()
        """A download has ended, or a part is whole."""
        self._news = asyncio.Event()
        """There is more to ask for, or less to wait for."""
        self._done_bytes = self._total_bytes = 0
        self._finished: set[str] = set()
        self._downloads: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, HolderStream] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._choice = HolderChoice(liars)
        self._stalled: set[str] = set()
        self._failure: BaseException | None = None
        self._progress_at = time.monotonic()

    async def run(self) -> None:
        """Receive everything, or raise as `fetch_parts`."""
        try:
            while len(self._finished) < len(self._parts):
                if self._failure is not None:
                    raise self._failure
                # However many peers fail meanwhile: each of them wakes this loop.
                if not self._finishing and time.monotonic() - self._progress_at > NO_PROGRESS_S:
                    raise self._unavailable(f"nothing has come for {NO_PROGRESS_S:.0f} s")
                await self._start_downloads()
                self._give_up_stalled()
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._changed.wait()
        finally:
            tasks = [*self._downloads.values(), *self._finishing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in self._unfinished.values():
                one.close()

    async def _start_downloads(self) -> None:
        """Ask peers that are not asked yet, if there is room for more."""
        if len(self._downloads) >= MAX_HOLDERS or not (self._queue or self._not_begun):
            return
        holders = await self._find_holders()
        self._choice.find(holders)
        if not self._choice.possible and not self._downloads:
            raise self._unavailable("no peer is known that shares it" if not holders else "no peer that is known does")
        for holder in self._choice.to_ask(time.monotonic()):
            if len(self._downloads) >= MAX_HOLDERS:
                return
            if holder not in self._downloads:
                if self._choice.note_tried(holder, "asked"):
                    self._progress_at = time.monotonic()
                self._downloads[holder] = asyncio.create_task(self._download(holder))

    def _give_up_stalled(self) -> None:
        """End the streams of peers that send nothing, if others do or could be asked instead."""
        for holder in self._choice.stalled({one: stream.silent_s for one, stream in self._streams.items()}):
            self._stalled.add(holder)
            self._streams[holder].close()
            if self._choice.note_tried(holder, "given up"):  # the next one has its time, too
                self._progress_at = time.monotonic()

    async def _download(self, holder: str) -> None:
        try:
            with closing(HolderStream(await self._open_stream(holder))) as stream:
                self._streams[holder] = stream
                await self._download_over(stream)
            self._choice.note_end(holder)
        except RemoteError as raised:
            is_stalled, error = holder in self._stalled, raised
            if is_stalled:
                error = PeerTimeout(f"peer …{holder[-6:]} sent nothing for {STALLED_S:.0f} s")
            self._choice.note_error(holder, error, time.monotonic(), is_stalled)
            is_liar = isinstance(error, ProtocolViolation)
            level = logging.WARNING if is_liar else logging.DEBUG
            logger.log(level, "Weights of %s are not taken from …%s: %s", self._store.model, holder[-6:], error)
        except Exception as error:  # noqa: BLE001  (the caller of `run` gets it)
            self._failure = self._failure or error
        finally:
            self._downloads.pop(holder, None)
            self._streams.pop(holder, None)
            self._stalled.discard(holder)
            self._changed.set()

    async def _download_over(self, stream: HolderStream) -> None:
        """Receive over one stream until nothing is left that this peer could send."""
        found = await stream.find(self._store.model, self._store.revision)
        offered = offers(found.digests, self._store.digests)
        if not self._has_more_for(offered):
            raise WeightsNotShared(f"peer …{stream.peer_id[-6:]} shares none of the parts that are missing")
        asked: deque[Chunk] = deque()  # and not received, in order
        beginning: asyncio.Task[None] | None = None
        try:
            while True:
                if beginning is not None and beginning.done():
                    await beginning
                    beginning = None
                if beginning is None and self._next_part(offered) is not None:
                    beginning = asyncio.create_task(self._begin_next(stream, offered))
                while len(asked) < WINDOW and (chunk := self._take(offered)) is not None:
                    asked.append(chunk)
                    await stream.ask(chunk)
                if asked:
                    data = await stream.receive(asked[0])
                    await self._accept(stream, asked.popleft(), data)
                elif beginning is not None:
                    await asyncio.wait((beginning,))
                elif not self._has_more_for(offered):
                    return
                else:  # others are about to receive the rest, or fail to
                    self._news.clear()
                    await self._news.wait()
        except RemoteError:
            if beginning is not None and beginning.done():
                await beginning  # what went wrong there comes first: the peer says no more behind a refusal
            raise
        finally:
            if beginning is not None:
                beginning.cancel()
                await asyncio.gather(beginning, return_exceptions=True)
            self._queue.extendleft(reversed(asked))
            self._news.set()

    def _next_part(self, offered: frozenset[str]) -> str | None:
        """The next part to begin that this peer has, if little is left to ask it for."""
        left = islice((chunk for chunk in self._queue if chunk.part in offered), NEXT_PART_CHUNKS)
        if sum(1 for _ in left) >= NEXT_PART_CHUNKS:
            return None
        return next((one for one in self._not_begun if one in offered), None)

    async def _begin_next(self, stream: HolderStream, offered: frozenset[str]) -> None:
        """Begin the next part, unless another download has just done so."""
        part = self._next_part(offered)
        if part is None:
            return
        self._not_begun.remove(part)
        begun = None
        try:
            manifest = self._store.manifests.get(part)
            if manifest is None:
                data = await stream.manifest(part)
                manifest = await asyncio.to_thread(self._store.add_manifest, part, data)
            self._store.require_space([part])
            begun = UnfinishedPart(self._store, part, await stream.chunk_digests(part, manifest))
            await _to_end(begun.open)
            missing = await _to_end(begun.missing)
        except BaseException:
            if begun is not None:
                begun.close()
            self._not_begun.insert(0, part)
            self._news.set()
            raise
        self._unfinished[part] = begun
        self._total_bytes += manifest.size_bytes
        self._done_bytes += manifest.size_bytes - sum(chunk.length for chunk in missing)
        self._left[part] = len(missing)
        self._queue.extend(missing)
        self._news.set()
        self._note_progress()
        if not missing:
            self._finish_soon(part)

    def _take(self, offered: frozenset[str]) -> Chunk | None:
        """The next chunk that this peer can send."""
        for index, chunk in enumerate(self._queue):
            if chunk.part in offered:
                del self._queue[index]
                return chunk
        return None

    def _has_more_for(self, offered: frozenset[str]) -> bool:
        """Whether this peer may be needed yet: for parts that are not begun, or if others fail."""
        return any(part in offered and part not in self._finished for part in self._parts)

    async def _accept(self, stream: HolderStream, chunk: Chunk, data: bytes | memoryview) -> None:
        part = self._unfinished[chunk.part]
        if not await asyncio.to_thread(part.write, chunk, data):
            self._queue.appendleft(chunk)
            self._news.set()
            raise ProtocolViolation(
                f"peer …{stream.peer_id[-6:]} sent a wrong chunk of part {chunk.part}, which was not used"
            )
        self._done_bytes += chunk.length
        self._left[chunk.part] -= 1
        self._note_progress()
        if not self._left[chunk.part]:
            self._finish_soon(chunk.part)

    def _finish_soon(self, part: str) -> None:
        """Finish a part while others arrive: a drive may take seconds to have all of it."""
        task = asyncio.create_task(self._finish(part))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, part: str) -> None:
        try:
            await _to_end(self._unfinished[part].finish)
        except Exception as error:  # noqa: BLE001  (the caller of `run` gets it)
            if isinstance(error, ProtocolViolation):  # what is trusted says so, and yet it cannot be used
                error = WeightsUnavailable(str(error))
            self._failure = self._failure or error
            self._changed.set()
            return
        del self._unfinished[part]
        self._finished.add(part)
        self._note_progress()
        self._changed.set()
        self._news.set()

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()
        self._choice.note_progress()
        self._on_progress(FetchProgress(self._done_bytes, self._total_bytes))

    def _unavailable(self, why: str) -> WeightsUnavailable:
        parts = [part for part in self._parts if part not in self._finished]
        told = self._choice.told
        return WeightsUnavailable(
            f"part {parts[0]} of {self._store.model}{f' and {len(parts) - 1} others' if len(parts) > 1 else ''} cannot "
            f"be had from peers: {why}{f' ({told})' if told else ''}. Start a server that shares its weights "
            "(--share-weights on), or use --weights-from hub or a folder"
        )


async def _to_end(work: Callable[[], T]) -> T:
    """Do work in a thread. Where this is canceled, the thread has ended before it returns."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise
