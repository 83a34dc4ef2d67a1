"""An Internet of network namespaces on this machine: hosts with public addresses, and homes behind routers.

Nothing in it reaches the real Internet, nor the other way round. It needs root and nftables. The addresses are public
ones, because libp2p relays no others; they exist in these namespaces only.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

CLONE_NEWNET = 0x40000000

needs_upnp = pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="there is no miniupnpd here")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nft") is None or shutil.which("ip") is None,
    reason="the laboratory of homes needs root, nftables and iproute2",
)


class Nat(enum.Enum):
    """How a router chooses the port under which a connection is seen outside."""

    USUAL = "masquerade"
    """The port of the machine behind it, where it is free."""
    SYMMETRIC = "masquerade random,fully-random"
    """A random one for each connection."""


@dataclass(frozen=True)
class Host:
    """A machine: a network namespace.

    Attributes:
        namespace: its name.
        address: its IPv4 address.
        address6: its IPv6 address; empty if it has none.
    """

    namespace: str
    address: str
    address6: str = ""

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs a command on this machine."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def run(self, *arguments: str, text: str | None = None) -> str:
        """Run a command on this machine to its end; what it prints. Raises `CalledProcessError`."""
        command = self.command(*arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True, input=text).stdout

    def enter(self) -> None:
        """Move this process to that machine: what it opens, and what it starts, is there from now on.

        Only of the calling thread, so call it before there are others.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/var/run/netns/{self.namespace}").open() as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")


@dataclass
class Home:
    """A local network behind a router.

    Attributes:
        router: at the Internet with `eth0`, at home with `lan`.
        machines: in the local network.
        lets_in: whether the router lets in what is new, by IPv6 only.
    """

    router: Host
    machines: tuple[Host, ...]
    nat: Nat = Nat.USUAL
    lets_in: bool = False

    @property
    def machine(self) -> Host:
        """The first machine of the local network."""
        return self.machines[0]

    def set_rules(self) -> None:
        """Have the router forward what comes from inside, and answers to it, and nothing else."""
        inside6 = "accept" if self.lets_in else "drop"
        self.router.run("nft", "-f", "-", text=_RULES.format(nat=self.nat.value, inside6=inside6))

    def restart_router(self) -> None:
        """The router forgets all connections, as when it is switched off and on."""
        self.change_outer_address(self.router.address)

    def change_outer_address(self, address: str) -> None:
        """The router is seen under another address from now on, and has forgotten all connections."""
        run = self.router.run
        run("ip", "link", "set", "eth0", "down")  # then masqueraded connections are forgotten
        run("ip", "-4", "addr", "flush", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        if self.router.address6:
            run("ip", "addr", "replace", f"{self.router.address6}/64", "dev", "eth0", "nodad")
        self.router = Host(self.router.namespace, address, self.router.address6)

    def limit_uplink(self, kbit_per_s: int) -> None:
        """What the router sends takes so long, and waits up to a second before that, as at many homes."""
        bucket = f"rate {kbit_per_s}kbit burst 8k latency 1s"
        self.router.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket.split())

    def forward_port(self, port: int) -> None:
        """Forward a TCP port to the first machine, as somebody does on the router's page."""
        rule = f"iifname eth0 tcp dport {port} dnat to {self.machine.address}"
        self.router.run("nft", "add", "rule", "ip", "nat", "pre", *rule.split())

    def close_ports(self) -> None:
        """Take all ports that were forwarded by hand back. Connections that are there go on."""
        self.router.run("nft", "flush", "chain", "ip", "nat", "pre")

    def run_upnp(self, folder: Path) -> subprocess.Popen[bytes]:
        """Have the router forward ports for whoever asks by UPnP or NAT-PMP. The process is the caller's to end."""
        self.router.run("nft", "-f", "-", text=_UPNP_RULES)
        config = folder / f"{self.router.namespace}.conf"
        config.write_text(_UPNP_CONFIG.format(lease=folder / f"{self.router.namespace}.lease"))
        pid_file = str(folder / f"{self.router.namespace}.pid")
        command = self.router.command("miniupnpd", "-d", "-f", str(config), "-P", pid_file)
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


_GUARD = """
table ip guard {
  chain forwarding {
    type filter hook forward priority 0; policy drop
    iifname "lan" accept
    ct state established,related accept
    ct status dnat accept
  }
  chain incoming {
    type filter hook input priority 0; policy accept
    iifname "eth0" ct state new drop
  }
}
"""
_UPNP_CONFIG = """
ext_ifname=eth0
listening_ip=lan
enable_natpmp=yes
enable_upnp=yes
secure_mode=yes
system_uptime=yes
uuid=8a1e1f0e-5f0b-4d0a-9b52-6a2c3b1f7d11
upnp_table_name=filter
upnp_nat_table_name=filter
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
lease_file={lease}
allow 1024-65535 0.0.0.0/0 1024-65535
"""
_UPNP_RULES = """
table inet filter {
  chain miniupnpd { }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
  chain forward { type filter hook forward priority 0; policy accept; jump miniupnpd; }
  chain prerouting { type nat hook prerouting priority -100; policy accept; jump prerouting_miniupnpd; }
  chain postrouting { type nat hook postrouting priority 100; policy accept; jump postrouting_miniupnpd; }
}
"""
_RULES = """
table ip nat {{
  chain pre {{ type nat hook prerouting priority -100; }}
  chain post {{
    type nat hook postrouting priority 100
    oifname "eth0" {nat}
  }}
}}
table ip6 guard {{
  chain forwarding {{
    type filter hook forward priority 0; policy {inside6}
    iifname "lan" accept
    ct state established,related accept
    meta l4proto ipv6-icmp accept
  }}
}}
""" + _GUARD.replace("{", "{{").replace("}", "}}")


def received_bytes(host: Host) -> int:
    """What has arrived at a machine from its network; at a router, from the Internet."""
    return int(host.run("cat", "/sys/class/net/eth0/statistics/rx_bytes"))


class Laboratory:
    """The Internet, as long as the context is entered."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._prefix = f"sw{os.getpid()}x{next(self._numbers)}"
        self._made: list[str] = []
        self._internet = ""
        self._ports = itertools.count()
        self._plugged6: list[Host] = []
        self._networks6: dict[str, str] = {}

    def __enter__(self) -> Laboratory:
        self._internet = self._add("net")
        self._ip("netns", "exec", self._internet, "ip", "link", "add", "br0", "type", "bridge")
        self._ip("netns", "exec", self._internet, "ip", "link", "set", "br0", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for namespace in reversed(self._made):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

    def host(self, name: str, number: int, ipv6: bool = False) -> Host:
        """A machine at 45.0.0.`number`, which anybody can reach."""
        address6 = f"2a00:45::{number}" if ipv6 else ""
        host = Host(self._add(name), f"45.0.0.{number}", address6)
        self._plug(host)
        self._set_routes6()
        return host

    def home(
        self,
        name: str,
        number: int,
        *,
        machines: int = 1,
        nat: Nat = Nat.USUAL,
        ipv6: bool = False,
        lets_in: bool = False,
    ) -> Home:
        """A home whose router is at 45.0.0.`number`.

        Args:
            ipv6: whether its machines have public IPv6 addresses as well.
            lets_in: whether the router lets new connections to these in.
        """
        router = Host(self._add(f"{name}-router"), f"45.0.0.{number}", f"2a00:45::{number}" if ipv6 else "")
        self._plug(router)
        run = router.run
        run("ip", "link", "add", "lan", "type", "bridge")
        run("ip", "link", "set", "lan", "up")
        run("ip", "addr", "add", f"192.168.{number}.1/24", "dev", "lan")
        run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        if ipv6:
            run("sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
            run("ip", "addr", "add", f"2a00:45:0:{number}::1/64", "dev", "lan", "nodad")
        hosts = tuple(self._inside(router, f"{name}{index}", number, index, ipv6) for index in range(machines))
        if ipv6:
            self._networks6[f"2a00:45:0:{number}::/64"] = router.address6
            self._set_routes6()
        home = Home(router, hosts, nat, lets_in)
        home.set_rules()
        return home

    def _inside(self, router: Host, name: str, number: int, index: int, ipv6: bool) -> Host:
        address6 = f"2a00:45:0:{number}::{index + 2}" if ipv6 else ""
        host = Host(self._add(name), f"192.168.{number}.{index + 2}", address6)
        outside = f"in{next(self._ports)}"
        router.run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        router.run("ip", "link", "set", outside, "master", "lan", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "route", "add", "default", "via", f"192.168.{number}.1")
        if ipv6:
            host.run("ip", "addr", "add", f"{address6}/64", "dev", "eth0", "nodad")
            host.run("ip", "-6", "route", "add", "default", "via", f"2a00:45:0:{number}::1")
        return host

    def _plug(self, host: Host) -> None:
        """Connect a machine to the Internet."""
        port = f"w{next(self._ports)}"
        add = ("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        self._ip("netns", "exec", self._internet, *add)
        self._ip("netns", "exec", self._internet, "ip", "link", "set", port, "master", "br0", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        if host.address6:
            host.run("ip", "addr", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
            self._plugged6.append(host)

    def _set_routes6(self) -> None:
        """Whoever is at the Internet finds the homes' networks behind their routers."""
        for host in self._plugged6:
            for network, router in self._networks6.items():
                if router != host.address6:
                    host.run("ip", "-6", "route", "replace", network, "via", router)

    def _add(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        self._ip("netns", "add", namespace)
        self._made.append(namespace)
        enter = ("netns", "exec", namespace)
        self._ip(*enter, "ip", "link", "set", "lo", "up")
        for which in ("all", "default"):  # addresses can be used at once
            self._ip(*enter, "sysctl", "-qw", f"net.ipv6.conf.{which}.accept_dad=0")
        return namespace

    @staticmethod
    def _ip(*arguments: str | Sequence[str]) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)
