"""What a client believes of servers, from the audits that it has made itself. Pure: the caller passes the time in.

One number for each server, the probability that it does not compute what it announces, drives everything: how often it
is audited, what a route with it costs, and whether it is used at all. In log-odds, an audit adds

    log P(result | dishonest) / P(result | honest)

with `MISSED`, the share of audits that a dishonest server passes, and `FALSE_ALARMS`, the share that an honest one
fails. That is Wald's sequential test, and as it goes back to `TRUSTED` at most, a server that begins to lie late is
caught nearly as fast as one that always did (CUSUM). It is quarantined at `QUARANTINE`: with these rates, an honest
server gets there once in more than 10,000 audits.

A new identity is believed as much as those before it deserved: its first work is audited, then more of it than of
others', and its routes cost more until it has done some work. It gets to do that as a witness, where a wrong answer
reaches nobody. So a liar gains nothing by leaving its name behind. Evidence fades by half in `HALF_LIFE_S`.

Where a server that was trusted is found to be wrong, others may have begun to lie, too. So the next work of each server
is audited, if its last audit was before that.
"""

from __future__ import annotations

import enum
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from swarm.data_structures import ServerInfo

FALSE_ALARMS = 0.001
MISSED = 0.8
DOUBTFUL_HONEST = 0.02
"""Share of the audits in which an honest server differs in single tokens: with experts, a rounding can choose another
one."""

ALWAYS_WRONG = 0.5
"""Share of the dishonest servers that pass no audit at all, as far as is known before the first."""

STRANGERS, BAD_STRANGERS = 10.0, 1.0
"""Servers that were audited for the first time, and those of them that were dishonest, before there was any."""

STRANGER = math.log(BAD_STRANGERS / (STRANGERS - BAD_STRANGERS))
"""Log-odds of a server of which nothing is known, before there was any audit."""

MAX_STRANGERS = 100.0
"""First audits that are remembered."""

TRUSTED = math.log(0.01 / 0.99)
"""Log-odds below which no server gets: it is still audited."""

QUARANTINE = math.log(1e4)
"""Log-odds at which a server is not used any more."""

HALF_LIFE_S = 86400.0

MAX_PEERS = 4096
"""Servers of which a client keeps an opinion."""

PENALTY_S = 1.0
"""Seconds that a route costs more with a server that is certainly dishonest, so a tenth of that with one of which
nothing is known."""


class Agreement(enum.Enum):
    """What comes of an audit."""

    SAME = "agrees"
    DOUBTFUL = "differs in single tokens"
    DIFFERENT = "differs more than honest machines do"
    UNRELATED = "has computed something else"

    @property
    def is_wrong(self) -> bool:
        """Whether an honest server hardly ever gets this."""
        return self in (Agreement.DIFFERENT, Agreement.UNRELATED)


_EVIDENCE = {
    Agreement.SAME: math.log(MISSED / (1 - FALSE_ALARMS)),
    Agreement.DOUBTFUL: math.log((1 - MISSED) / DOUBTFUL_HONEST),
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
        first = math.log(1 - ALWAYS_WRONG) if is_same and not self.agreed else 0.0
        return Opinion(
            max(TRUSTED, before.log_odds + _EVIDENCE[result] + first),
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


@dataclass(frozen=True, slots=True)
class Beliefs:
    """All that a client believes, to be kept.

    Attributes:
        servers: peer id -> opinion, the oldest first.
        strangers, bad_strangers: servers that were audited for the first time, and the dishonest ones among them.
        betrayed_at: when a server that was trusted was found to be wrong.
    """

    servers: Mapping[str, Opinion]
    strangers: float = STRANGERS
    bad_strangers: float = BAD_STRANGERS
    betrayed_at: float = -math.inf

    def at_clock(self, shift: float) -> Beliefs:
        """The same in the times of a clock that is `shift` seconds ahead."""
        servers = {peer: replace(one, when=one.when + shift) for peer, one in self.servers.items()}
        return replace(self, servers=servers, betrayed_at=self.betrayed_at + shift)


class Suspicions:
    """The opinions of one client. All times are seconds of one clock.

    Args:
        max_peers: opinions that are kept; of those that say no ill, the oldest is forgotten first.
    """

    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._opinions: OrderedDict[str, Opinion] = OrderedDict()
        self._strangers, self._bad_strangers = STRANGERS, BAD_STRANGERS
        self._betrayed_at = -math.inf

    def __len__(self) -> int:
        return len(self._opinions)

    @property
    def beliefs(self) -> Beliefs:
        """All that is believed now."""
        return Beliefs(dict(self._opinions), self._strangers, self._bad_strangers, self._betrayed_at)

    def believe(self, beliefs: Beliefs) -> None:
        """Take over what was believed before. Of two opinions on a server, the newer one counts."""
        for peer_id, opinion in beliefs.servers.items():
            known = self._opinions.get(peer_id)
            if known is None or opinion.when > known.when:
                self._keep(peer_id, opinion)
        if beliefs.strangers > self._strangers:
            self._strangers, self._bad_strangers = beliefs.strangers, beliefs.bad_strangers
        self._betrayed_at = max(self._betrayed_at, beliefs.betrayed_at)

    def of(self, peer_id: str, now: float) -> Opinion:
        """What is believed of a server."""
        known = self._opinions.get(peer_id)
        return known.at(now) if known is not None else Opinion(self._stranger, now)

    @property
    def _stranger(self) -> float:
        """Log-odds of a server that was never audited."""
        return math.log(self._bad_strangers / (self._strangers - self._bad_strangers))

    def record(self, peer_id: str, result: Agreement, now: float) -> Opinion:
        """Take in the result of an audit."""
        known = self._opinions.get(peer_id)
        if known is None:
            self._strangers += 1
            self._bad_strangers += result.is_wrong
            if self._strangers > MAX_STRANGERS:  # the oldest count less and less
                self._strangers, self._bad_strangers = self._strangers / 2, self._bad_strangers / 2
        elif result.is_wrong and known.log_odds < STRANGER and known.when >= self._betrayed_at:
            self._betrayed_at = now
        opinion = self.of(peer_id, now).after(result, now)
        self._keep(peer_id, opinion)
        return opinion

    def _keep(self, peer_id: str, opinion: Opinion) -> None:
        self._opinions[peer_id] = opinion
        self._opinions.move_to_end(peer_id)
        if len(self._opinions) > self._max_peers:
            harmless = (peer for peer, one in self._opinions.items() if one.log_odds < STRANGER)
            del self._opinions[next(harmless, next(iter(self._opinions)))]

    def audit_rate(self, peer_id: str, least: float, now: float) -> float:
        """Which share of a server's work is to be audited: all if none was yet (or since a trusted one was wrong), then
        as much as it is suspected, and never less than `least`; nothing if that is 0."""
        known = self._opinions.get(peer_id)
        if not least or known is None or known.when < self._betrayed_at:
            return 1.0 if least else 0.0
        return max(least, known.at(now).probability)

    def witnesses(self, servers: Iterable[ServerInfo], chance: random.Random, now: float) -> list[ServerInfo]:
        """In which order servers are asked to be witnesses; those that are not used at all are left out.

        Those first of which good is known, in random order, so that new names do not outvote them. Half of the times,
        the fastest of those that were never audited goes before them: this is how it becomes known.
        """
        asked = [one for one in servers if not self.of(one.peer_id, now).is_quarantined]
        chance.shuffle(asked)
        asked.sort(key=lambda one: one.peer_id not in self._opinions or self.of(one.peer_id, now).log_odds >= STRANGER)
        new = [one for one in asked if one.peer_id not in self._opinions]
        if new and chance.random() < 0.5:
            fastest = max(new, key=lambda one: one.throughput)
            asked.remove(fastest)
            asked.insert(0, fastest)
        return asked

    def quarantined(self, now: float) -> frozenset[str]:
        """Servers that are not used."""
        return frozenset(peer for peer in self._opinions if self.of(peer, now).is_quarantined)

    def penalties(self, peer_ids: Iterable[str], now: float) -> dict[str, float]:
        """Peer id -> seconds that a route costs more because the server may be dishonest."""
        stranger = PENALTY_S * Opinion(self._stranger).probability  # of most, in a large swarm
        return {
            peer: PENALTY_S * self.of(peer, now).probability if peer in self._opinions else stranger
            for peer in peer_ids
        }
