"""What a client believes of servers, from the audits that it has made itself. Pure: the caller passes the time in.

One number for each server, the probability that it does not compute what it announces, drives everything: how often it
is audited, what a route with it costs, and whether it is used at all. In log-odds, an audit adds

    log P(result | dishonest) / P(result | honest)

with `MISSED`, the share of audits that a dishonest server passes, and `FALSE_ALARMS`, the share that an honest one
fails. That is Wald's sequential test, and as it goes back to `TRUSTED` at most, a server that begins to lie late is
caught nearly as fast as one that always did (CUSUM). It is quarantined at `QUARANTINE`: with these rates, an honest
server gets there once in more than 10,000 audits.

A new identity begins at `STRANGER`: it is audited more often and costs a little more until it has done some work, so
that a liar gains nothing by leaving its name behind. Evidence fades by half in `HALF_LIFE_S`.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

FALSE_ALARMS = 0.001
MISSED = 0.8

STRANGER = math.log(0.1 / 0.9)
"""Log-odds of a server of which nothing is known."""

TRUSTED = math.log(0.01 / 0.99)
"""Log-odds below which no server gets: it is still audited."""

QUARANTINE = math.log(1e4)
"""Log-odds at which a server is not used any more."""

HALF_LIFE_S = 86400.0

PENALTY_S = 0.5
"""Seconds that a route costs more with a server that is certainly dishonest."""


class Agreement(enum.Enum):
    """What comes of an audit."""

    SAME = "agrees"
    DIFFERENT = "differs more than honest machines do"
    UNRELATED = "has computed something else"


_EVIDENCE = {
    Agreement.SAME: math.log(MISSED / (1 - FALSE_ALARMS)),
    Agreement.DIFFERENT: math.log((1 - MISSED) / FALSE_ALARMS),
    Agreement.UNRELATED: QUARANTINE - TRUSTED,
}


@dataclass(frozen=True, slots=True)
class Opinion:
    """What is believed of one server.

    Attributes:
        log_odds: that it is dishonest.
        when: of the last audit.
        agreed, differed: audits so far.
    """

    log_odds: float = STRANGER
    when: float = 0.0
    agreed: int = 0
    differed: int = 0

    def at(self, now: float) -> Opinion:
        """The opinion when time has passed: it goes back towards that of a stranger."""
        kept = 0.5 ** (max(0.0, now - self.when) / HALF_LIFE_S)
        return replace(self, log_odds=STRANGER + (self.log_odds - STRANGER) * kept, when=max(now, self.when))

    def after(self, result: Agreement, now: float) -> Opinion:
        """The opinion after one more audit."""
        before = self.at(now)
        is_same = result is Agreement.SAME
        return Opinion(
            max(TRUSTED, before.log_odds + _EVIDENCE[result]),
            before.when,
            self.agreed + is_same,
            self.differed + (not is_same),
        )

    @property
    def probability(self) -> float:
        """That it is dishonest."""
        return 1 / (1 + math.exp(-self.log_odds))

    @property
    def is_quarantined(self) -> bool:
        return self.log_odds >= QUARANTINE


class Suspicions:
    """The opinions of one client. All times are seconds of one clock.

    Args:
        max_peers: opinions that are kept; of those that say no ill, the oldest is forgotten first.
    """

    def __init__(self, max_peers: int = 4096) -> None:
        self._max_peers = max_peers
        self._opinions: OrderedDict[str, Opinion] = OrderedDict()

    def __len__(self) -> int:
        return len(self._opinions)

    def of(self, peer_id: str, now: float) -> Opinion:
        """What is believed of a server."""
        known = self._opinions.get(peer_id)
        return known.at(now) if known is not None else Opinion(when=now)

    def record(self, peer_id: str, result: Agreement, now: float) -> Opinion:
        """Take in the result of an audit."""
        opinion = self.of(peer_id, now).after(result, now)
        self._opinions[peer_id] = opinion
        self._opinions.move_to_end(peer_id)
        if len(self._opinions) > self._max_peers:
            harmless = (peer for peer, one in self._opinions.items() if one.log_odds < STRANGER)
            del self._opinions[next(harmless, next(iter(self._opinions)))]
        return opinion

    def audit_rate(self, peer_id: str, least: float, now: float) -> float:
        """Which share of a server's work is to be audited: as much as it is suspected, and never less than `least`."""
        return max(least, self.of(peer_id, now).probability) if least else 0.0

    def quarantined(self, now: float) -> frozenset[str]:
        """Servers that are not used."""
        return frozenset(peer for peer in self._opinions if self.of(peer, now).is_quarantined)

    def penalties(self, peer_ids: Iterable[str], now: float) -> dict[str, float]:
        """Peer id -> seconds that a route costs more because the server may be dishonest."""
        stranger = PENALTY_S * Opinion().probability  # of most, in a large swarm
        return {
            peer: PENALTY_S * self.of(peer, now).probability if peer in self._opinions else stranger
            for peer in peer_ids
        }
