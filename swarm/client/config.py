"""The configuration of a client, as a caller gives it and as it is resolved."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from swarm.data_structures import Span, WeightDigests, WireFormat
from swarm.errors import InvalidOption
from swarm.membership.invite import Invite
from swarm.models.weights.quantization import QUANTIZATION_FORMS

DEFAULT_AUDIT = 0.01
"""Share of the servers' work that is recomputed by default."""


@dataclass(frozen=True)
class NetworkOptions:
    """Which servers a client uses, and how long it waits for them; see `from_pretrained(network=...)`.

    Attributes:
        request_timeout: upper limit in seconds for one reply. Most timeouts are much shorter, because they are
            estimated from earlier replies.
        wait_for_blocks: seconds to wait for blocks that no server offers.
        allowed_servers: peer ids of the servers that may be used; None allows all. A set may be changed meanwhile, and
            counts as it is whenever the swarm's announcements are read.
        blocked_servers: peer ids of servers that are never used.
        push: let servers send their outputs directly to the next server instead of through this client.
        quant: use only servers whose weights have this form, or one of these forms: "none", "packed" (as a packed
            checkpoint has them), "int8", "nf4" or "int4" (4 bits without bitsandbytes on a GPU). None allows all.
        exact: use no server that computes with some neurons of its feed-forward layers only (`sparse`; docs/flash.md).
            By default no text depends on such a choice of neurons unless its user has agreed to it. Quantized weights
            are another question: the weights that a server announces are the ones with which it computes exactly.
        audit: share of the servers' work that is computed again by others to find out whether it was right, 0 to 1. New
            and suspected servers are audited more often; 0 for none (docs/trust.md).
        opinions: file that keeps what audits say of servers, also for `swarm status --opinions`; None to forget it.
        points: file of the key whose points sessions spend: that of your own server, so that being served goes with
            serving (docs/trust.md). None to spend none.
        digests: file of `swarm digest` with the digests that the blocks' weights must have; None for those of the
            model's own source: its files here, or on the model hub.
    """

    request_timeout: float = 60.0
    wait_for_blocks: float = 60.0
    allowed_servers: Collection[str] | None = None
    blocked_servers: Collection[str] = ()
    push: bool = True
    quant: str | Collection[str] | None = None
    exact: bool = True
    audit: float = DEFAULT_AUDIT
    opinions: str | Path | None = None
    points: str | Path | None = None
    digests: str | Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.audit <= 1:
            raise InvalidOption(f"audit={self.audit!r} is not a share from 0 to 1, such as 0.01 for one percent")
        forms = self.weight_forms
        if forms is not None and (not forms or not forms <= QUANTIZATION_FORMS):
            known = ", ".join(sorted(QUANTIZATION_FORMS))
            raise InvalidOption(f"quant={self.quant!r} is not one or several of {known}, or None for all")

    @property
    def weight_forms(self) -> frozenset[str] | None:
        """The forms of weights that servers may have; None allows all."""
        if self.quant is None:
            return None
        return frozenset([self.quant] if isinstance(self.quant, str) else self.quant)


def parse_share(option: str, text: str) -> float:
    """Read a share such as `1%` or `0.01`. Raises `InvalidOption`."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise InvalidOption(f"{option} {text!r} is not a share such as 1% or 0.01")
    return share


@dataclass(frozen=True)
class ClientConfig:
    """The resolved configuration of a client.

    Attributes:
        initial_peers: addresses of peers of the swarm.
        wire: format of hidden states in both directions.
        local_blocks: first blocks that the client computes itself; None for none.
        show_route: print every route that a session takes.
        network: which servers are used, and how long to wait for them.
        membership: this client's invite to a private swarm; None for an open swarm.
        refresh_period: seconds between reads of the swarm's announcements while the client is in use.
    """

    initial_peers: tuple[str, ...]
    wire: WireFormat = WireFormat.NONE
    local_blocks: Span | None = None
    show_route: bool = False
    network: NetworkOptions = field(default_factory=NetworkOptions)
    membership: Invite | None = None
    refresh_period: float = 15.0


@dataclass(frozen=True)
class ModelIdentity:
    """What identifies a model to the swarm.

    Attributes:
        name: the name that servers announce.
        revision: the revision of its files.
        blocks: number of blocks of the whole model.
        digests: that blocks must have; None to compare none.
    """

    name: str
    revision: str
    blocks: int
    digests: WeightDigests | None = None


@dataclass(frozen=True)
class RequestOptions:
    """The options that every request of one client carries or obeys.

    Attributes:
        revision: revision of the model.
        wire: format of the replies.
        timeout: upper limit in seconds for one reply. Most timeouts are much shorter; see
            `swarm.client.wire.timeout_estimator`.
        push: let servers send their outputs directly to the next server.
    """

    revision: str
    wire: WireFormat
    timeout: float
    push: bool = True
