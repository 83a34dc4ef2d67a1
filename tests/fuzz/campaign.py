"""The campaign: sends batches of all kinds, at the same time, until as many messages are sent as were asked for."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tests.fuzz.kinds import Kind, Violation
from tests.fuzz.targets import Targets

T = TypeVar("T")

MAX_BATCH_S = 120.0
"""For a batch that hangs. One that takes longer than a few seconds only makes the campaign slow."""

MAX_VIOLATIONS = 20
"""Of a kind, after which it sends no more: the rest would be the same."""

PROGRESS_S = 10.0

UNCOUNTED_PERIOD_S = 5.0
"""Between two batches of a kind that does not count."""


@dataclass(frozen=True)
class Plan:
    """What is sent.

    Attributes:
        messages: of all kinds together.
        seconds: after which the campaign ends even if fewer were sent.
        seed: from which everything follows.
        replay: the number of the only batch that each kind sends; None for all.
        may_be_short: whether it is right if fewer messages were sent, on a busy machine.
    """

    messages: int
    seconds: float
    seed: int
    replay: int | None = None
    may_be_short: bool = False


@dataclass
class Sent:
    """What a kind has sent.

    Attributes:
        seconds: that its batches took.
        outcomes: see `Kind`.
        violations: each with the batch (`KIND:SEED:BATCH`) in which it was seen.
    """

    messages: int = 0
    batches: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def batch_random(kind: str, seed: int, batch: int) -> random.Random:
    """The randomness of one batch: the same on every machine."""
    return random.Random(f"{kind}:{seed}:{batch}")


class Campaign:
    """One campaign against `targets`.

    Args:
        say: takes lines about its progress.

    Attributes:
        sent: what each kind has sent.
    """

    def __init__(self, targets: Targets, kinds: Sequence[Kind], plan: Plan, say: Callable[[str], None] = print) -> None:
        self.sent = {kind.name: Sent(outcomes=kind.outcomes) for kind in kinds}
        self._targets = targets
        self._kinds = kinds
        self._plan = plan
        self._say = say
        shares = sum(kind.share for kind in kinds)
        self._goals = {kind.name: -(-plan.messages * kind.share // max(1, shares)) for kind in kinds}
        self._began = time.monotonic()
        self._is_ending = False

    @property
    def messages(self) -> int:
        """How many of those that count were sent."""
        return sum(self.sent[kind.name].messages for kind in self._kinds if kind.share)

    @property
    def is_short(self) -> bool:
        """Whether time was over before all were sent."""
        return (
            self._plan.replay is None
            and not self._plan.may_be_short
            and any(
                self.sent[name].messages < goal and len(self.sent[name].violations) < MAX_VIOLATIONS
                for name, goal in self._goals.items()
            )
        )

    async def run(self) -> None:
        """Send everything. What goes wrong is in `sent`."""
        self._began = time.monotonic()
        counted = [kind for kind in self._kinds if kind.share]
        progress = asyncio.create_task(self._tell_progress())
        others = [asyncio.create_task(self._send_kind(kind)) for kind in self._kinds if not kind.share]
        try:
            await asyncio.gather(*map(self._send_kind, counted))
            if not counted:
                await asyncio.gather(*others)
        finally:
            progress.cancel()
            self._is_ending = True  # what does not count ends with the others
            await asyncio.gather(*others)

    async def _send_kind(self, kind: Kind) -> None:
        sent = self.sent[kind.name]
        try:
            await self._guard(kind.open(self._targets), f"{kind.name}: open", sent)
            for batch in itertools.count():
                if self._plan.replay is not None:
                    batch = self._plan.replay
                elif self._is_over(kind):
                    break
                began = time.monotonic()
                name = f"{kind.name}:{self._plan.seed}:{batch}"
                sending = kind.send(batch_random(kind.name, self._plan.seed, batch))
                sent.messages += await self._guard(sending, name, sent) or 0
                sent.batches += 1
                sent.seconds += time.monotonic() - began
                if self._plan.replay is not None:
                    break
                if not kind.share:
                    await asyncio.sleep(UNCOUNTED_PERIOD_S)
        finally:
            await self._guard(kind.close(), f"{kind.name}: close", sent)

    def _is_over(self, kind: Kind) -> bool:
        sent = self.sent[kind.name]
        is_done = bool(kind.share) and sent.messages >= self._goals[kind.name]
        is_late = time.monotonic() - self._began >= self._plan.seconds
        return self._is_ending or is_done or is_late or len(sent.violations) >= MAX_VIOLATIONS

    async def _guard(self, work: Awaitable[T], name: str, sent: Sent) -> T | None:
        """The result of `work`; whatever it raises is a violation."""
        try:
            async with asyncio.timeout(MAX_BATCH_S):
                return await work
        except Violation as violation:
            sent.violations.append(f"{name}: {violation}")
        except Exception:
            sent.violations.append(f"{name}: {traceback.format_exc()}")
        return None

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            by_kind = ", ".join(f"{name} {sent.messages}" for name, sent in self.sent.items())
            bad = sum(len(sent.violations) for sent in self.sent.values())
            self._say(
                f"{time.monotonic() - self._began:4.0f} s: {self.messages} of {self._plan.messages} messages "
                f"({by_kind}), {bad} violations"
            )


def table(sent: dict[str, Sent], top: int = 6) -> str:
    """A Markdown table of what was sent, by kind.

    Args:
        top: how many outcomes to name of each kind.
    """
    lines = ["| kind | messages | what came of them | violations |", "| --- | --- | --- | --- |"]
    for name, one in sent.items():
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in one.outcomes.most_common(top))
        rest = len(one.outcomes) - top
        more = f" and {rest} more" if rest > 0 else ""
        lines.append(f"| {name} | {one.messages:,} | {outcomes}{more} | {len(one.violations)} |")
    return "\n".join(lines)
