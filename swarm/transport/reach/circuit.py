"""A place at a relay: what a peer has to ask for, so that others can reach it through that relay.

This is the part of libp2p's circuit relay v2 by which a peer reserves its place. The daemon does the rest: it carries
connections, and accepts those that come through a relay. It could reserve places by itself, but does so only after
minutes, at relays that are fixed when it starts, and tries one that has failed again only after an hour.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PDaemonError, PeerID

from swarm.errors import PeerLost, ProtocolViolation, RelayRefused
from swarm.transport import daemon_streams

RELAY_PROTOCOL_ID = "/libp2p/circuit/relay/0.2.0/hop"
"""By it peers reserve a place at a relay and are connected through it."""

RESERVE, STATUS = 0, 2
OK = 100
REASONS = {
    200: "it has refused",
    201: "it has no place left",
    202: "it does not relay for this peer",
    400: "it did not understand the request",
    401: "it did not expect the request",
}

LIBP2P_LIMITS = (120, 1 << 17)
"""Seconds and bytes of a relay that takes no notice of the limits that it was given."""

MAX_ANSWER_BYTES = 1 << 14
MIN_PLACE_S, MAX_PLACE_S = 10.0, 86400.0
"""A relay's clock may be wrong: no place counts for shorter or longer than this."""


def _hop_message() -> Any:
    """The protobuf message of relay requests and answers, as the specification of circuit relay v2 has it."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="swarm/circuit.proto", package="swarm.circuit", syntax="proto2")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> None:
        made = file.message_type.add(name=name)
        for field, number, kind, label, type_name in fields:
            made.field.add(name=field, number=number, type=kind, label=label, type_name=type_name or None)

    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    message(
        "Reservation",
        ("expire", 1, kinds.TYPE_UINT64, one, ""),
        ("addrs", 2, kinds.TYPE_BYTES, many, ""),
        ("voucher", 3, kinds.TYPE_BYTES, one, ""),
    )
    message("Limit", ("duration", 1, kinds.TYPE_UINT32, one, ""), ("data", 2, kinds.TYPE_UINT64, one, ""))
    message(
        "HopMessage",
        ("type", 1, kinds.TYPE_INT32, one, ""),
        ("reservation", 3, kinds.TYPE_MESSAGE, one, ".swarm.circuit.Reservation"),
        ("limit", 4, kinds.TYPE_MESSAGE, one, ".swarm.circuit.Limit"),
        ("status", 5, kinds.TYPE_INT32, one, ""),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("swarm.circuit.HopMessage"))


HopMessage = _hop_message()


def encode_reserve() -> bytes:
    """The request for a place, with its length in front."""
    body: bytes = HopMessage(type=RESERVE).SerializeToString()
    return bytes([len(body)]) + body


@dataclass(frozen=True, slots=True)
class Place:
    """What a relay grants.

    Attributes:
        seconds: for how long.
        limit_s, limit_bytes: after which it ends each connection that it carries, in each direction; 0 for never.
    """

    seconds: float
    limit_s: int
    limit_bytes: int

    @property
    def is_too_small(self) -> bool:
        """Whether connections end so soon that some sessions never get on: their history alone has more bytes."""
        return (self.limit_s, self.limit_bytes) == LIBP2P_LIMITS


def place_granted(answer: bytes, now: float) -> Place:
    """The place that a relay's answer, without its length, grants at the Unix time `now`.

    Raises `RelayRefused` if it grants none, `ProtocolViolation` if the relay's answer is not valid.
    """
    try:
        message = HopMessage.FromString(answer)
    except DecodeError as error:
        raise ProtocolViolation(f"not an answer of a relay: {error}") from None
    if message.type != STATUS or not message.HasField("status"):
        raise ProtocolViolation("not an answer of a relay: it has no status")
    if message.status != OK:
        raise RelayRefused(f"the relay grants no place: {REASONS.get(message.status, f'status {message.status}')}")
    seconds = min(max(float(message.reservation.expire) - now, MIN_PLACE_S), MAX_PLACE_S)
    return Place(seconds, message.limit.duration, message.limit.data)


async def ask_for_place(p2p: P2P, relay: PeerID, timeout_s: float) -> Place:
    """Reserve a place at a relay, or renew it. The relay must be connected, or be known.

    Raises `PeerLost`, `RelayRefused` or `ProtocolViolation`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await daemon_streams.open_stream(p2p, relay, RELAY_PROTOCOL_ID)
            try:
                writer.write(encode_reserve())
                return place_granted(await _read_answer(reader), time.time())
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise PeerLost(f"relay …{str(relay)[-6:]} did not answer within {timeout_s:g} s") from None
    except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as error:
        raise PeerLost(f"relay …{str(relay)[-6:]} cannot be used: {error}") from None


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    length, shift = 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > MAX_ANSWER_BYTES or shift > 28:
            raise ProtocolViolation(f"a relay's answer may have {MAX_ANSWER_BYTES} bytes")
        if not byte & 0x80:
            return await reader.readexactly(length)
