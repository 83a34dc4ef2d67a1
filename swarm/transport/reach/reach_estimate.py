"""What the reports of others say about whether a peer can be reached directly. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address


class Reach(enum.Enum):
    """How others reach a peer."""

    UNKNOWN = "unknown"
    """No peer has tried it yet."""
    DIRECT = "direct"
    HIDDEN = "hidden"
    """Others cannot dial it. It can be reached through relays at most."""


@dataclass(frozen=True, slots=True)
class DialReport:
    """What one peer says after it has dialed this one back.

    Attributes:
        host: IP address from which it saw this peer come.
        reached: the ports at which this peer has answered.
        is_trusted: whether it is an initial peer, which whoever runs this peer has chosen.
    """

    host: str
    reached: frozenset[int]
    is_trusted: bool = False


@dataclass(frozen=True, slots=True)
class ReachEstimate:
    """What follows from the reports.

    Attributes:
        addresses: where others can dial this peer.
        outer_host: IP address under which most see it, of IPv4 where there is one: it is that of the whole network
            behind a router. Empty if no peer has said so.
    """

    reach: Reach
    addresses: tuple[str, ...] = ()
    outer_host: str = ""


def judge(reports: Sequence[DialReport], ports: Sequence[int], own_hosts: Collection[str] = ()) -> ReachEstimate:
    """Weigh the reports: a port counts as open if at least half of those who tried it say so.

    Where a trusted peer has reached this one, only reports of trusted ones count. Otherwise strangers, who may be many,
    could have it withdraw.

    IPv4 and IPv6 are weighed apart, because a router may let in what comes by one of them only; of each, the address
    counts that most have seen. An IPv6 address has to be this machine's own, so that one liar cannot make it up. Peers
    in the same local network dial another address than strangers do. Where some see this peer come from a public
    address, only their reports count.

    Args:
        ports: those that were tried, in the order in which they should be announced.
        own_hosts: the IP addresses of this machine.
    """
    believed = [report for report in reports if ip_address(report.host).version == 4 or report.host in own_hosts]
    if not believed:
        return ReachEstimate(Reach.UNKNOWN)
    counted = [report for report in believed if ip_address(report.host).is_global] or believed
    addresses: list[str] = []
    hosts: list[str] = []
    for version in (4, 6):
        same = [report for report in counted if ip_address(report.host).version == version]
        trusted = [report for report in same if report.is_trusted]
        if any(report.reached for report in trusted):
            same = trusted
        if same:
            host, _ = Counter(report.host for report in same).most_common(1)[0]
            hosts.append(host)
            addresses += _open_addresses([report for report in same if report.host == host], ports)
    return ReachEstimate(Reach.DIRECT if addresses else Reach.HIDDEN, tuple(addresses), hosts[0])


def _open_addresses(reports: Sequence[DialReport], ports: Sequence[int]) -> list[str]:
    """The addresses at which most have reached this peer, which all have seen at the same host."""
    open_ports = (port for port in ports if 2 * sum(port in one.reached for one in reports) >= len(reports))
    return [tcp_address(reports[0].host, port) for port in open_ports]


def tcp_address(host: str, port: int) -> str:
    """The multiaddress of a TCP port."""
    return f"/ip{ip_address(host).version}/{host}/tcp/{port}"
