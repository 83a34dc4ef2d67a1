"""Has samples of real work computed again by other servers, and draws the consequences.

An audit is an ordinary session: a prompt of real hidden states over the blocks of one hop. The server that computes it
cannot know that it is one, and the server that is audited does not learn of it. The witness is drawn at random among
the other servers that hold these blocks in the same precision (`Suspicions.witnesses`).

If both results agree, as far as honest machines do (`swarm.trust.comparison`), that speaks for the server. If not,
others are asked until two agree: whichever differs from them is suspected (`swarm.routing.suspicion`). Where there are
no others, nothing is proven, and no server is blamed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from swarm.client.chain.chain import Chain
from swarm.client.hops.hop_session import SessionContext
from swarm.client.hops.work_sample import WorkSample
from swarm.client.routes.events import Audited, EventListener, ignore_events
from swarm.client.routes.route_source import RouteSource
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.common.large_payloads import in_thread
from swarm.data_structures import Hop, Route, ServerInfo, Span, StepLayout
from swarm.errors import MissingBlocks, SwarmError
from swarm.routing.router import Alternative
from swarm.routing.suspicion import Agreement, Suspicions
from swarm.trust.comparison import Verdict, difference, majority
from swarm.trust.opinion_file import OpinionFile
from swarm.trust.receipts import ServedBlocks

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""Samples that wait. Further ones are dropped: they are copies of whole sessions."""

MAX_WITNESSES = 4
"""Servers that are asked about one sample."""

CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for unfinished audits, in seconds."""

AUDIT_TIMEOUT_S = 120.0
"""Seconds that a server gets for a sample."""


class Auditor:
    """The audits of one client; implements `SampleTaker`. For the network thread.

    Args:
        servers: those that may be used now.
        suspicions: what is believed of them; the results go there.
        rate: share of the work that is audited at least; 0 for no audits.
        file: where the opinions are kept; None to forget them when the client ends.
        emit: receives an event for each audit.
        chance: draws what is audited, and by whom.

    Attributes:
        tokens: token-blocks that were computed again, so far.
    """

    def __init__(
        self,
        servers: Callable[[], tuple[ServerInfo, ...]],
        suspicions: Suspicions,
        rate: float,
        file: OpinionFile | None = None,
        emit: EventListener = ignore_events,
        chance: random.Random | None = None,
    ) -> None:
        self.tokens = 0
        self._servers = servers
        self._suspicions = suspicions
        self._rate = rate
        self._file = file
        if file is not None:
            file.load(suspicions)
        self._emit = emit
        self._chance = chance if chance is not None else random.SystemRandom()
        self._waiting: deque[WorkSample] = deque()
        self._task: asyncio.Task[None] | None = None

    def wants(self, hop: Hop) -> bool:
        """Whether to audit this work: a new draw for each call. False if no server could be asked about it."""
        rate = self._suspicions.audit_rate(hop.server.peer_id, self._rate, time.monotonic())
        return self._chance.random() < rate and any(is_witness(one, hop) for one in self._servers())

    def take(self, sample: WorkSample) -> None:
        """Audit a sample in the background, one after the other."""
        if len(self._waiting) >= MAX_WAITING:
            return
        self._waiting.append(sample)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Drop the audits that wait. If there is a file, finish them first, for at most `CLOSE_TIMEOUT_S`."""
        if self._task is None:
            return
        if self._file is not None and not self._task.done():
            logger.info("finishing audits, for %.0f s at most", CLOSE_TIMEOUT_S)
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
        self._waiting.clear()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while self._waiting:
            sample = self._waiting.popleft()
            try:
                await self.audit(sample)
            except SwarmError as error:
                logger.debug("an audit of %s came to nothing: %s", sample.hop.server.short_id, error)
            except Exception:
                logger.exception("an audit of %s failed", sample.hop.server.short_id)

    async def audit(self, sample: WorkSample) -> None:
        """Find out whether a sample is right, and note what follows from that."""
        claimed = [(part.layout, part.outputs) for part in sample.parts]
        results = {sample.hop.server.peer_id: await in_thread(_own_tokens, claimed, sample)}
        able = [one for one in self._servers() if is_witness(one, sample.hop)]
        for witness in self._suspicions.witnesses(able, self._chance, time.monotonic()):
            if len(results) > MAX_WITNESSES:
                break
            try:
                results[witness.peer_id] = await self._ask(witness, sample)
            except SwarmError as error:
                logger.debug("%s did not take part in an audit: %s", witness.short_id, error)
                continue
            if (verdict := await in_thread(_majority, results, sample)) is not None:
                self._conclude(sample, verdict)
                if self._file is not None:
                    await self._file.save(self._suspicions)
                return

    async def _ask(self, witness: ServerInfo, sample: WorkSample) -> torch.Tensor:
        """What a server makes of the inputs of a sample, `[tokens, hidden]`. Raises `SwarmError`."""
        context = replace(
            sample.context,
            routes=_OnlyRoute(Hop(witness, sample.hop.span), sample.context.routes),
            span=sample.hop.span,
            emit=ignore_events,
            samples=None,
            kept_receipts=None,
        )
        inputs = await in_thread(lambda: [_as_sent(part.inputs, context) for part in sample.parts])
        chain = Chain(context)
        try:
            async with asyncio.timeout(AUDIT_TIMEOUT_S):
                await chain.open()
                layouts = [part.layout for part in sample.parts]
                outputs = await chain.steps(list(zip(inputs, layouts, strict=True)))
        except TimeoutError:
            raise MissingBlocks((), f"it took more than {AUDIT_TIMEOUT_S:.0f} s") from None
        finally:
            await chain.close()
        self.tokens += sample.tokens * sample.hop.span.length
        return await in_thread(_own_tokens, list(zip(layouts, outputs, strict=True)), sample)

    def _conclude(self, sample: WorkSample, verdict: Verdict) -> None:
        now = time.monotonic()
        for peer_id, (agreement, found) in verdict.items():
            before = self._suspicions.of(peer_id, now).is_quarantined
            opinion = self._suspicions.record(peer_id, agreement, now)
            self._emit(Audited(peer_id, sample.hop.span, agreement is Agreement.SAME, opinion.probability))
            if agreement is not Agreement.SAME:
                logger.warning("%s %s: %s", peer_id, agreement.value, found)
            if opinion.is_quarantined and not before:
                logger.warning("%s is not used any more: it does not compute what it announces", peer_id)


def _majority(results: dict[str, torch.Tensor], sample: WorkSample) -> Verdict | None:
    """The verdict once two results agree; None before."""
    server, span, wire = sample.hop.server, sample.hop.span, sample.context.options.wire
    return majority(
        list(results),
        lambda one, other: difference(
            results[one], results[other], span.length, server.compute_dtype, server.quantization, wire
        ),
    )


def is_witness(server: ServerInfo, hop: Hop) -> bool:
    """Whether a server holds the blocks of a hop, and announces the same weights and precision."""
    if server.peer_id == hop.server.peer_id:
        return False
    if not server.span.start <= hop.span.start < hop.span.end <= server.span.end:
        return False
    return ServedBlocks.of(server, hop.span) == ServedBlocks.of(hop.server, hop.span)


def _as_sent(hidden: PackedHidden, context: SessionContext) -> PackedHidden:
    """Inputs in the format in which this client sends all inputs; as for a replay, if they would not stay the same."""
    flat = hidden.decoded()
    sent = PackedHidden.of(flat, context.options.wire, hidden.dtype)
    return sent if torch.equal(sent.decoded(), flat) else hidden


def _own_tokens(parts: list[tuple[StepLayout, PackedHidden]], sample: WorkSample) -> torch.Tensor:
    """The tokens that the audited server has computed, `[tokens, hidden]`."""
    kept = []
    for layout, hidden in parts:
        rows = hidden.decoded().split(list(layout.counts))
        kept += [
            row[max(0, sample.own_from - start) :] for row, start in zip(rows, layout.starts, strict=True) if len(row)
        ]
    return torch.cat(kept)


class _OnlyRoute(RouteSource):
    """The route of an audit: one server, and no other if it fails."""

    missing_blocks_timeout = 0.0

    def __init__(self, hop: Hop, routes: RouteSource) -> None:
        self._hop = hop
        self._routes = routes
        self._failed = False

    async def route(
        self, span: Span, before: str | None, after: str | None, max_length: int, avoid: frozenset[str] = frozenset()
    ) -> Route:
        if self._failed or self._hop.server.peer_id in avoid:
            raise MissingBlocks(tuple(range(span.start, span.end)), "the server was asked for an audit only")
        return Route((self._hop,))

    def alternative(self, current: Route, before: str | None, after: str | None, max_length: int) -> Alternative | None:
        return None

    def note_step(self, hop: Hop, seconds: float, tokens: int) -> None:
        self._routes.note_step(hop, seconds, tokens)

    def offers(self, hop: Hop) -> bool:
        return hop == self._hop

    def note_overtaken(self, hop: Hop, seconds: float, tokens: int) -> None: ...

    async def refresh(self) -> None: ...

    def report_failure(self, peer_id: str, error: Exception) -> None:
        self._failed = True
        self._routes.report_failure(peer_id, error)

    def report_success(self, peer_id: str) -> None:
        self._routes.report_success(peer_id)

    def timeout_factor(self, peer_id: str) -> float:
        return self._routes.timeout_factor(peer_id)

    def may_push(self, before: str, after: str) -> bool:
        return False

    def distrust_link(self, before: str, after: str) -> None: ...

    def report_route(self, route: Route) -> None: ...
