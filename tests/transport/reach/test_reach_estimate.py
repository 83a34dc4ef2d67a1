from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address

from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from swarm.transport.reach.reach_estimate import DialReport, Reach, ReachEstimate, judge, tcp_address

HOME, OTHER, LAN, LAN_TOO = "81.2.69.142", "8.8.8.8", "192.168.0.7", "10.0.0.7"
SIX = "2a02:8071:b783::1"

hosts = st.sampled_from([HOME, OTHER, LAN, LAN_TOO, SIX]) | st.ip_addresses().map(str)
ports = st.integers(1, 65535)
some_ports = st.lists(st.sampled_from([1, 80, 31337, 65535]), max_size=4, unique=True)
reports_of_anybody = st.lists(st.builds(DialReport, hosts, some_ports.map(frozenset)), max_size=8)


def most_common(by_host: dict[str, list[DialReport]], hosts: list[str]) -> list[str]:
    """Those of the hosts that most have seen; several where it is a draw."""
    most = max((len(by_host[host]) for host in hosts), default=0)
    return [host for host in hosts if len(by_host[host]) == most]


def open_at(host: str, reports: list[DialReport], tried: list[int]) -> tuple[str, ...]:
    """The addresses of the ports that half of the reports have reached."""
    counts = {port: sum(port in report.reached for report in reports) for port in tried}
    return tuple(tcp_address(host, port) for port in tried if counts[port] * 2 >= len(reports))


def said(host: str, *reached: int) -> DialReport:
    return DialReport(host, frozenset(reached))


def test_without_reports_nothing_is_known():
    assert judge([], [31337]) == ReachEstimate(Reach.UNKNOWN, (), "")


def test_a_port_counts_as_open_if_half_of_those_who_tried_say_so():
    for yes, no, expected in [
        (1, 0, True),
        (1, 1, True),
        (1, 2, False),
        (2, 1, True),
        (2, 2, True),
        (2, 3, False),
        (0, 1, False),
    ]:
        reports = [said(HOME, 31337)] * yes + [said(HOME)] * no
        assert bool(judge(reports, [31337]).addresses) is expected
        assert judge(reports, [31337]) == judge(reports[::-1], [31337])


@given(reports_of_anybody, some_ports, st.sets(hosts, max_size=3))
def test_whatever_is_reported_the_verdict_follows_from_it(reports, tried, own_hosts):
    verdict = judge(reports, tried, own_hosts)
    by_host: dict[str, list[DialReport]] = {}
    for report in reports:
        if ip_address(report.host).version == 4 or report.host in own_hosts:
            by_host.setdefault(report.host, []).append(report)
    assert (verdict.reach is Reach.UNKNOWN) == (verdict.outer_host == "") == (not by_host)
    assert (verdict.reach is Reach.DIRECT) == bool(verdict.addresses)
    if not by_host:
        return
    strangers = any(ip_address(host).is_global for host in by_host)
    counted = [host for host in by_host if ip_address(host).is_global == strangers]
    possible = []  # for each kind of address, what may follow; several where as many have seen one as another
    for version in (4, 6):
        alike = [host for host in counted if ip_address(host).version == version]
        tops = most_common(by_host, alike)
        possible.append([open_at(host, by_host[host], tried) for host in tops] or [()])
        if alike and ip_address(verdict.outer_host).version != version:
            assert version == 6  # the address of IPv4 comes first
        elif alike:
            assert verdict.outer_host in tops
    assert verdict.addresses in [four + six for four in possible[0] for six in possible[1]]


public_reports = st.builds(DialReport, st.sampled_from([HOME, OTHER, SIX]), some_ports.map(frozenset))


@given(some_ports, some_ports, st.integers(1, 5), st.data())
def test_liars_who_are_fewer_than_the_honest_change_nothing(tried, truly_open, honest, data):
    truth = [DialReport(HOME, frozenset(truly_open))] * honest
    lies = data.draw(st.lists(public_reports, max_size=honest - 1))
    mixed = data.draw(st.permutations([*truth, *lies]))
    assert judge(mixed, tried) == judge(truth, tried)


def test_strangers_however_many_cannot_have_a_peer_withdraw_that_its_initial_peers_reach():
    strangers = [said(HOME), said(OTHER), said(OTHER)]
    trusted = replace(said(HOME, 31337), is_trusted=True)
    assert judge([*strangers, trusted], [31337]).addresses == (tcp_address(HOME, 31337),)
    in_vain = replace(said(HOME), is_trusted=True)
    assert judge([in_vain, said(HOME, 31337), said(HOME, 31337)], [31337]).reach is Reach.DIRECT
    assert judge([in_vain, in_vain, trusted, said(HOME, 31337)], [31337]).reach is Reach.HIDDEN, "one may lie"


def test_what_comes_by_ipv4_and_by_ipv6_is_judged_apart():
    reports = [said(HOME), said(HOME), said(SIX, 31337)]
    assert judge(reports, [31337], [SIX]) == ReachEstimate(Reach.DIRECT, (f"/ip6/{SIX}/tcp/31337",), HOME)
    reports = [said(SIX), said(SIX), said(HOME, 31337)]
    assert judge(reports, [31337], [SIX]) == ReachEstimate(Reach.DIRECT, (f"/ip4/{HOME}/tcp/31337",), HOME)
    both = (f"/ip4/{HOME}/tcp/31337", f"/ip6/{SIX}/tcp/31337")
    assert judge([said(SIX, 31337), said(HOME, 31337)], [31337], [SIX]) == ReachEstimate(Reach.DIRECT, both, HOME)


def test_nobody_gives_this_machine_an_ipv6_address_that_it_has_not():
    assert judge([said(SIX, 31337)], [31337], [HOME]) == ReachEstimate(Reach.UNKNOWN)
    assert judge([said(HOME), said(HOME), said(SIX, 31337)], [31337]) == ReachEstimate(Reach.HIDDEN, (), HOME)


@given(st.ip_addresses(), ports)
def test_the_address_of_a_port_is_one_that_libp2p_reads(host, port):
    parsed = Multiaddr(tcp_address(str(host), port))
    assert parsed["tcp"] == str(port)
    assert ip_address(parsed[f"ip{host.version}"]) == host
