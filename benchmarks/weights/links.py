"""Links between two peers: loopback, or two network namespaces whose devices send at a limited rate."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tests.homes.laboratory import Host, Laboratory

LOOPBACK = Host("", "127.0.0.1")
WRITE_BYTES = 1 << 20
BURST = {100: "32kb", 1000: "256kb"}
"""Bucket of the limiter, by Mbit/s: about 2 ms of the rate."""

T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """Two machines. Where they are this machine itself, their namespace is empty.

    Attributes:
        name: says how fast it is.
    """

    name: str
    holder: Host
    receiver: Host

    def tcp_bytes_per_s(self, size: int) -> float:
        """What one bare TCP stream carries from the holder to the receiver."""
        address = (self.holder.address, 0)
        listening = _on(self.holder, lambda: socket.create_server(address))
        receiving = _on(self.receiver, lambda: socket.create_connection(listening.getsockname()))
        sending, _ = listening.accept()

        def send() -> None:
            data = bytes(WRITE_BYTES)
            with sending:
                for _ in range(-(-size // WRITE_BYTES)):
                    sending.sendall(data)

        sender = threading.Thread(target=send)
        buffer, got = bytearray(WRITE_BYTES), 0
        with listening, receiving:
            began = time.perf_counter()
            sender.start()
            while count := receiving.recv_into(buffer):
                got += count
            seconds = time.perf_counter() - began
        sender.join()
        return got / seconds


def can_limit() -> bool:
    """Whether there can be limited links here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


@contextmanager
def limited_link(mbit: int) -> Iterator[Link]:
    """Two namespaces that send at `mbit` Mbit/s at most, by the kernel's token bucket. Needs root and iproute2."""
    with Laboratory() as laboratory:
        hosts = [laboratory.host(name, number) for name, number in (("holder", 2), ("receiver", 3))]
        for host in hosts:
            limit = ("rate", f"{mbit}mbit", "burst", BURST[mbit], "latency", "50ms")
            host.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield Link(f"{mbit} Mbit/s" if mbit < 1000 else f"{mbit // 1000} Gbit/s", *hosts)


@contextmanager
def loopback() -> Iterator[Link]:
    """This machine's loopback device, which nothing limits."""
    yield Link("loopback", LOOPBACK, LOOPBACK)


def enter(host: Host) -> None:
    """Move this thread to a machine of a link."""
    if host.namespace:
        host.enter()


def _on(host: Host, make: Callable[[], T]) -> T:
    """What `make` returns on a machine; this thread stays where it is."""
    made: list[T] = []

    def run() -> None:
        enter(host)
        made.append(make())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]
