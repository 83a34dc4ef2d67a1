"""The messages of libp2p's circuit relay v2, and asking a relay for a place, through which others can reach a peer.

The daemon does the rest: it connects to others through relays, and accepts connections that come through one. It could
reserve places by itself, but does so only after minutes, at relays that are fixed when it starts, and tries one that
has failed again only after an hour. What a relay itself does is in `swarm.transport.reach.relay`.
"""

from __future__ import annotations

import asyncio
import time
from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PDaemonError, PeerID

from swarm.errors import MembershipNotProven, PeerLost, ProtocolViolation, RelayRefused
from swarm.transport import daemon_streams

RELAY_PROTOCOL_ID = "/libp2p/circuit/relay/0.2.0/hop"
"""By it peers reserve a place at a relay and are connected through it."""

STOP_PROTOCOL_ID = "/libp2p/circuit/relay/0.2.0/stop"
"""By it a relay offers a peer that holds a place a connection to another one."""

RESERVE, CONNECT, STATUS = 0, 1, 2
STOP_CONNECT, STOP_STATUS = 0, 1
"""Types of messages of the two protocols."""


class Status(IntEnum):
    """What a relay, or a peer that is offered a connection, answers."""

    OK = 100
    RESERVATION_REFUSED = 200
    LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


REASONS = {
    Status.RESERVATION_REFUSED: "it has refused",
    Status.LIMIT_EXCEEDED: "it has no place left",
    Status.MALFORMED_MESSAGE: "it did not understand the request",
    Status.UNEXPECTED_MESSAGE: "it did not expect the request",
}

MAX_MESSAGE_BYTES = 1 << 14
MIN_PLACE_S, MAX_PLACE_S = 10.0, 86400.0
"""A relay's clock may be wrong: no place counts for shorter or longer than this."""


def _make_messages() -> tuple[Any, Any]:
    """The protobuf messages of both protocols, as the specification of circuit relay v2 has them."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="swarm/circuit.proto", package="swarm.circuit", syntax="proto2")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> None:
        made = file.message_type.add(name=name)
        for field, number, kind, label, type_name in fields:
            made.field.add(name=field, number=number, type=kind, label=label, type_name=type_name or None)

    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    number, part = kinds.TYPE_INT32, kinds.TYPE_MESSAGE
    peer, limit = ".swarm.circuit.Peer", ".swarm.circuit.Limit"
    message("Peer", ("id", 1, kinds.TYPE_BYTES, one, ""), ("addrs", 2, kinds.TYPE_BYTES, many, ""))
    message(
        "Reservation",
        ("expire", 1, kinds.TYPE_UINT64, one, ""),
        ("addrs", 2, kinds.TYPE_BYTES, many, ""),
        ("voucher", 3, kinds.TYPE_BYTES, one, ""),
    )
    message("Limit", ("duration", 1, kinds.TYPE_UINT32, one, ""), ("data", 2, kinds.TYPE_UINT64, one, ""))
    message(
        "HopMessage",
        ("type", 1, number, one, ""),
        ("peer", 2, part, one, peer),
        ("reservation", 3, part, one, ".swarm.circuit.Reservation"),
        ("limit", 4, part, one, limit),
        ("status", 5, number, one, ""),
    )
    message(
        "StopMessage",
        ("type", 1, number, one, ""),
        ("peer", 2, part, one, peer),
        ("limit", 3, part, one, limit),
        ("status", 4, number, one, ""),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    hop, stop = (pool.FindMessageTypeByName(f"swarm.circuit.{name}") for name in ("HopMessage", "StopMessage"))
    return message_factory.GetMessageClass(hop), message_factory.GetMessageClass(stop)


HopMessage, StopMessage = _make_messages()


def encode(message: Any) -> bytes:
    """A message with its length in front."""
    body: bytes = message.SerializeToString()
    length, prefix = len(body), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*prefix, length]) + body


async def receive(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Read a message of one of the two kinds. Raises `ProtocolViolation`, `IncompleteReadError` or `OSError`."""
    length, shift = 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > MAX_MESSAGE_BYTES or shift > 28:
            raise ProtocolViolation(f"a message of a relay's protocol may have {MAX_MESSAGE_BYTES} bytes")
        if not byte & 0x80:
            break
    try:
        return kind.FromString(await reader.readexactly(length))
    except DecodeError as error:
        raise ProtocolViolation(f"not a message of a relay's protocol: {error}") from None


def place_granted(answer: Any, now: float) -> float:
    """For how many seconds a relay's answer, a `HopMessage`, grants a place at the Unix time `now`.

    Raises `RelayRefused` if it grants none, `MembershipNotProven` if the peer has to prove first that it is a member of
    the private swarm, `ProtocolViolation` if the relay's answer is not valid.
    """
    if answer.type != STATUS or not answer.HasField("status"):
        raise ProtocolViolation("not an answer of a relay: it has no status")
    if answer.status == Status.PERMISSION_DENIED:
        raise MembershipNotProven("the relay grants no place: this peer has not proven to it that it is a member")
    if answer.status != Status.OK:
        raise RelayRefused(f"the relay grants no place: {REASONS.get(answer.status, f'status {answer.status}')}")
    return min(max(float(answer.reservation.expire) - now, MIN_PLACE_S), MAX_PLACE_S)


async def ask_for_place(p2p: P2P, relay: PeerID, timeout_s: float) -> float:
    """Reserve a place at a relay, or renew it; for how many seconds. The relay must be connected, or be known.

    Raises `PeerLost`, or as `place_granted`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await daemon_streams.open_stream(p2p, relay, RELAY_PROTOCOL_ID)
            try:
                writer.write(encode(HopMessage(type=RESERVE)))
                return place_granted(await receive(reader, HopMessage), time.time())
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise PeerLost(f"relay …{str(relay)[-6:]} did not answer within {timeout_s:g} s") from None
    except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as error:
        raise PeerLost(f"relay …{str(relay)[-6:]} cannot be used: {error}") from None
