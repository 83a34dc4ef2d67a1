"""Connections and streams to other peers, opened through the libp2p daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from multiaddr import Multiaddr

CHUNK_BYTES = 1 << 16

STALL_TIMEOUT_S = 60.0
"""A peer that takes nothing of what is passed on to it for so long is given up, so that it does not keep memory."""


async def open_stream(p2p: P2P, peer: PeerID, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream to another peer, which serves `protocol`.

    It is a socket to the daemon. hivemind's own call leaves it open if the daemon cannot reach the peer, or if the
    caller does not wait so long: then both processes keep it for as long as anybody keeps the error.

    Raises `P2PDaemonError` if the peer cannot be reached, `OSError` or `IncompleteReadError` if the daemon cannot.
    """
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.STREAM_OPEN,
        streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer.to_bytes(), proto=[protocol]),
    )
    return await _ask(p2p, request)


async def connect(p2p: P2P, peer: PeerID, addresses: Sequence[Multiaddr]) -> None:
    """Connect to a peer at some of these addresses, unless it is connected already. Raises the same as `open_stream`.

    Whoever gives up waiting closes the socket to the daemon, which then gives up dialing.
    """
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.CONNECT,
        connect=p2pd_pb2.ConnectRequest(peer=peer.to_bytes(), addrs=[address.to_bytes() for address in addresses]),
    )
    _, writer = await _ask(p2p, request)
    writer.close()


async def addresses_of(p2p: P2P, peer: PeerID) -> list[str]:
    """Where the daemon's connections to a peer lead; empty if it has none. Raises the same as `open_stream`."""
    return [str(address) for one in await p2p.list_peers() if one.peer_id == peer for address in one.addrs]


async def carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    wait: Callable[[int], Awaitable[None]] | None = None,
    max_bytes: int | None = None,
) -> None:
    """Pass on what comes over one connection to another, until one of them ends; then close the other one.

    Args:
        wait: returns when so many bytes may be passed on.
        max_bytes: after which this ends, too.
    """
    size = CHUNK_BYTES
    try:
        while data := await reader.read(size):
            if wait is not None:
                await wait(len(data))
            if writer.is_closing():
                break
            writer.write(data)
            if writer.transport.get_write_buffer_size():
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await writer.drain()
            if max_bytes is not None:
                max_bytes -= len(data)
                size = min(CHUNK_BYTES, max_bytes)
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        pass
    finally:
        writer.close()


async def _ask(p2p: P2P, request: p2pd_pb2.Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask the daemon over a socket of its own. Raises `ControlFailure` if it says no."""
    reader, writer = await p2p._client.control.daemon_connector.open_connection()
    try:
        await write_pbmsg(writer, request)
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
        raise_if_failed(response)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer
