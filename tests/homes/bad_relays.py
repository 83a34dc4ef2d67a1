"""Relays that lie or drop: peers that announce that they relay for homes, but are of no use to them."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from hivemind.p2p import P2PDaemonError

from swarm.data_structures import ModelInfo, ServerInfo, ServerState
from swarm.dht.announcer import Announcer
from swarm.dht.validation import AnnouncementValidator
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.reach.circuit import RELAY_PROTOCOL_ID, HopMessage
from tests.homes.laboratory import Host
from tests.homes.processes import Process
from tests.infos import server_info
from tests.server_process import prepare

PERIOD_S = 5.0


class Badness(enum.Enum):
    """What a relay does that announces places."""

    REFUSES = "it grants none"
    DOES_NOT_CARRY = "it grants them, and carries no connections"
    DROPS = "it grants them, carries connections, and ends the one to the home when it is told to"


@dataclass
class BadRelay(Process):
    """Such a relay."""

    peer_id: str = ""

    def wait_ready(self) -> BadRelay:
        """Wait until it is announced."""
        self.peer_id = self.receive()
        return self

    @property
    def asked(self) -> int:
        """How often it was asked for a place."""
        self.connection.send("asked")
        return int(self.receive())

    def drop(self) -> None:
        """Have it end all its connections, but those to the initial peers, by which it is announced."""
        self.connection.send("drop")
        self.receive()


def run_bad_relay(
    connection: Connection, folder: str, host: Host, config: P2PConfig, badness: Badness, model: ModelInfo
) -> None:
    """The process of such a relay."""
    prepare(folder)
    host.enter()
    uvloop.run(_be_a_bad_relay(connection, config, badness, model))


async def _be_a_bad_relay(connection: Connection, config: P2PConfig, badness: Badness, model: ModelInfo) -> None:
    peer = await join_network(config, AnnouncementValidator())
    await peer.reach.known.wait()
    asked = 0

    async def answer(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        request = HopMessage.FromString(await reader.readexactly((await reader.readexactly(1))[0]))
        asked += request.type == 0
        status = 100 if badness is Badness.DOES_NOT_CARRY and request.type == 0 else 201
        body = HopMessage(type=2, status=status, reservation={"expire": int(time.time()) + 3600}).SerializeToString()
        writer.write(bytes([len(body)]) + body)
        await writer.drain()
        writer.close()

    def describe() -> ServerInfo:
        return server_info(0, 1, peer.peer_id, state=ServerState.JOINING, digests=(), relayed_peers=64)

    if badness is not Badness.DROPS:
        await peer._p2p.remove_binary_stream_handler(RELAY_PROTOCOL_ID)  # which refuses everything
        await peer._p2p.add_binary_stream_handler(RELAY_PROTOCOL_ID, answer)
    announcer = Announcer(peer, model, describe, PERIOD_S)
    await announcer.announce()
    announcer.start()
    connection.send(peer.peer_id)
    with suppress(EOFError, OSError):
        while (order := await asyncio.to_thread(connection.recv)) != "stop":
            if order == "drop":
                await _drop_all(peer, config.initial_peers)
            connection.send(asked)
    await announcer.stop()
    await peer.shutdown()


async def _drop_all(peer: Peer, spared: Sequence[str]) -> None:
    names = {address.rpartition("/p2p/")[2] for address in spared}
    for one in await peer._p2p.list_peers():
        if one.peer_id.to_base58() not in names:
            with suppress(P2PDaemonError, OSError):
                await peer._p2p._client.disconnect(one.peer_id)
