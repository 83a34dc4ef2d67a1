"""Servers on paper for the loop of early exit: a delay of 1 apart, and a client that takes no time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class PaperServers:
    """What does not depend on where tokens leave.

    Attributes:
        now: the time.
        sent, positions: when each step was sent off, and the position of its token, by number.
        settled: numbers of the steps that were settled.
        events: that were reported.
        warned: what the log was told.
    """

    now: int = field(default=0, kw_only=True)
    sent: dict[int, int] = field(default_factory=dict, kw_only=True)
    positions: dict[int, int] = field(default_factory=dict, kw_only=True)
    settled: list[int] = field(default_factory=list, kw_only=True)
    events: list[Any] = field(default_factory=list, kw_only=True)
    warned: list[str] = field(default_factory=list, kw_only=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, -1]

    def wait(self, ready: Any) -> None:
        while not ready():
            self.now += 1
            assert self.now < 1000

    def warn_once(self, message: str) -> None:
        self.warned.append(message)

    def settle(self, step: Any) -> None:
        self.settled.append(step.number)

    def report(self, event: Any) -> None:
        self.events.append(event)
