"""What a hostile peer sends in the place of a right message. Pure: all of it follows from `random`."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from swarm.data_structures import WireFormat
from swarm.errors import RemoteError
from swarm.protocol import messages
from swarm.protocol.framing import MAX_HEADER_BYTES, Frame, encode_prefix

INTEGERS = (-1, 0, 1, 2, 7, 127, 4096, 4097, 2**15, 2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**48, 2**63 - 1, 2**64 - 1)
FLOATS = (-1.0, -0.0, 1e-300, 0.5, 59.0, 1e9, 1e10, 1.7e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "float16", "bfloat16", "float32", "float64", "none", "blockwise8", "x" * 257, "y" * 2001, "\x1b[2J\n")
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, {"a": 1}, [[[]]], b"", "", 0, 0.0)
LATE_S = (0.05, 0.3, 1.0, 5.0, 30.0, 100.0)
MAX_PAYLOAD_BYTES = 1 << 20
MAX_RAW_BYTES = 300


@dataclass(frozen=True)
class Pause:
    """Nothing is sent for some seconds, nor is anything that follows."""

    seconds: float


@dataclass(frozen=True)
class HangUp:
    """The stream ends."""


Utterance = Frame | bytes | Pause | HangUp
"""A frame, bytes that are none, or what happens between them."""


@dataclass(frozen=True)
class Lie:
    """What is sent instead of a message.

    Attributes:
        name: what kind of lie it is.
        deceives: whether the other side may take other values for right ones: then no text can be compared.
        is_pushed: whether it may make another server compute other values. Its client sees through that by the copy for
            itself, if that comes in time.
    """

    name: str
    utterances: tuple[Utterance, ...]
    deceives: bool = False
    is_pushed: bool = False


def refusal_codes(root: type[RemoteError] = RemoteError) -> list[str]:
    """The codes of all errors that can be sent."""
    return [root.code, *(code for child in root.__subclasses__() for code in refusal_codes(child))]


CODES = tuple(sorted({*refusal_codes(), "", "no_such_code", "c" * 256}))


def tell(chance: random.Random, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    """A lie in the place of a message.

    Args:
        right: the message and its payload as a frame.
        past: frames that were sent before, to anybody.
    """
    name = chance.choice([name for name, (weight, _) in _LIES.items() for _ in range(weight)])
    lie = _LIES[name][1](chance, name, message, right, past)
    if isinstance(message, messages.PushRequest):
        return replace(lie, deceives=False, is_pushed=name in ("field", "payload", "of the past"))
    return lie


def changed_header(chance: random.Random, header: bytes) -> bytes:
    """A header with one value changed, left out, or added, somewhere in it."""
    tree = msgspec.msgpack.decode(header)
    changed = _changed(chance, tree)
    try:
        return msgspec.msgpack.encode(changed)
    except (OverflowError, ValueError):  # an integer of more than 64 bits
        return msgspec.msgpack.encode(_changed(chance, tree, only=OTHERS))


def changed_payload(chance: random.Random, payload: bytes | memoryview) -> bytes:
    """Bytes that are no right payload of the same message, whatever its format: their number is wrong, or they hold
    numbers that are none."""
    right = bytes(payload)
    choices: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: right[: chance.randrange(len(right))],
        lambda: right[:-1],
        lambda: right + b"\0",
        lambda: right + chance.randbytes(chance.randint(1, 500)),
        lambda: (right * 100)[:MAX_PAYLOAD_BYTES],
        lambda: b"\xff" * len(right),
        lambda: right[:-4] + struct.pack("<f", float("inf")) if len(right) >= 4 else b"\xff" * len(right),
    ]
    if not right:
        return chance.randbytes(chance.choice([1, 4, 4096, MAX_PAYLOAD_BYTES]))
    found = chance.choice(choices)()
    return found if found != right else right + b"\0"


def other_values(chance: random.Random, payload: bytes | memoryview) -> bytes:
    """As many numbers of 32 bits, a little larger, or huge."""
    values_N = np.frombuffer(payload, np.float32)
    factor = np.float32(chance.choice([1.01, -1.0, 0.0]))
    huge_N = np.sign(values_N) * np.float32(3e38)
    return bytes((huge_N if chance.random() < 0.3 else values_N * factor).astype(np.float32).tobytes())


def any_message(chance: random.Random) -> Frame:
    """Some valid message that nobody has asked for, often with one value changed."""
    count, wire = abs(chance.choice(INTEGERS)) % 2**31, chance.choice(list(WireFormat))
    checksum, session = chance.randbytes(32), chance.randbytes(16)
    message = chance.choice(
        [
            messages.SessionOpened(count),
            messages.StepReply(min(count, 2**31 - 2), wire, "float32", 1.0, checksum, chance.random() < 0.5),
            messages.ReplayReply(wire, "float32", 1.0, checksum),
            messages.Receipt(chance.randbytes(chance.choice([0, 400, 2048])), b"ssh-rsa AAAA", b"===="),
            messages.TabKept(None),
            messages.ForwardReply(wire, "float32", 1.0),
            messages.BackwardReply(wire, "float32", 1.0),
            messages.AdaptersStored(600.0),
            messages.InfoReply(0, count, count, count, "1"),
            messages.ProbeReply(),
            any_refusal(chance, None),
            any_refusal(chance, min(count, 2**31 - 1)),
            messages.StepRequest(0, [0], [1], wire, "float32"),
            messages.SetNeighbors("somebody", "somebody", session),
            messages.GiveUp(0, count),
            messages.CloseSession(),
            messages.MemberChallenge(chance.randbytes(32)),
            messages.InfoRequest(),
        ]
    )
    header = messages.encode(message)
    if chance.random() < 0.5:
        header = changed_header(chance, header)
    return Frame(header, chance.randbytes(chance.choice([0, 0, 0, 1, 128, 4096])))


def any_refusal(chance: random.Random, step: int | None) -> messages.Refusal:
    """A refusal with any code."""
    text = chance.choice(["no", "", "t" * 2000, "\x1b[31mred\u202e\n"])
    return messages.Refusal(chance.choice(CODES), text, step)


def _changed(chance: random.Random, tree: Any, only: Sequence[Any] = ()) -> Any:
    """A copy with one leaf changed, or one list made longer or shorter."""
    if isinstance(tree, list) and tree:
        index = chance.randrange(len(tree))
        action = chance.random()
        if action < 0.06:
            return tree[:-1]
        if action < 0.12:
            return [*tree, chance.choice(OTHERS)]
        if action < 0.15:
            return [*tree, *[tree[-1]] * chance.choice([1, 300, 5000])]
        return [*tree[:index], _changed(chance, tree[index], only), *tree[index + 1 :]]
    if only or chance.random() < 0.15:
        return chance.choice(only or OTHERS)
    if isinstance(tree, bool):
        return not tree
    if isinstance(tree, int):
        return chance.choice([tree - 1, tree + 1, tree * 2 + 1, *INTEGERS])
    if isinstance(tree, float):
        return chance.choice([-tree, tree * 1e6, *FLOATS])
    if isinstance(tree, str):
        return chance.choice([tree[:-1], tree + "x", *TEXTS])
    if isinstance(tree, bytes):
        return chance.choice([tree[:-1], tree + b"x", chance.randbytes(len(tree)), bytes(len(tree)), b""])
    return chance.choice([*OTHERS, *INTEGERS])


_Maker = Callable[[random.Random, str, messages.Message, Frame, Sequence[Frame]], Lie]


def _field(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    changed = Frame(changed_header(chance, right.header), right.payload)
    # Where a token has left decides how its values are read.
    return Lie(name, (changed,), getattr(message, "left", None) is not None)


def _payload(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    if isinstance(message, messages.PushRequest) and chance.random() < 0.5:
        return Lie(name, (Frame(right.header, other_values(chance, right.payload)),))
    return Lie(name, (Frame(right.header, changed_payload(chance, right.payload)),))


def _kind(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    return Lie(name, (any_message(chance),))


def _refused(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    own = message.step if isinstance(message, messages.StepReply) else None
    step = chance.choice([own, own, None, 0, (own or 0) + 1, 2**31 - 1])
    refused = Frame(messages.encode(any_refusal(chance, step)))
    if chance.random() < 0.7:
        return Lie(name, (refused,))
    return Lie(name, (refused, right) if chance.random() < 0.5 else (right, refused), _is_stateless(message))


def _raw(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    noise = chance.randbytes(chance.randint(1, MAX_RAW_BYTES))
    deep = b"\x92\xa9StepReply" + b"\x91" * 5000
    raw = chance.choice(
        [
            noise,
            encode_prefix(MAX_HEADER_BYTES + 1, 0) + noise,
            encode_prefix(MAX_HEADER_BYTES, 0) + noise,
            encode_prefix(2**32 - 1, 2**64 - 1),
            encode_prefix(len(right.header), 2**40) + right.header,
            encode_prefix(len(right.header), 2**63) + right.header,
            encode_prefix(0, 0),
            encode_prefix(0, len(noise)) + noise,
            encode_prefix(len(noise), 0) + noise,
            encode_prefix(len(deep), 0) + deep,
        ]
    )
    end: tuple[Utterance, ...] = chance.choice([(), (HangUp(),), (right,)])
    return Lie(name, (raw, *end))


def _cut(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    whole = encode_prefix(len(right.header), len(right.payload)) + right.header + bytes(right.payload)
    part = whole[: chance.randrange(len(whole))]
    rest: tuple[Utterance, ...] = (Pause(chance.choice(LATE_S)), whole[len(part) :])
    end = chance.choice([(), (HangUp(),), rest])
    return Lie(name, (part, *end), not end)  # then what comes next is read as the rest of its values


def _never(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    return Lie(name, ())


def _late(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    return Lie(name, (Pause(chance.choice(LATE_S)), right))


def _gone(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    return Lie(name, (HangUp(),) if chance.random() < 0.5 else (right, HangUp()))


def _again(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    times = chance.choice([2, 2, 3, 20])
    return Lie(name, (right,) * times, _is_stateless(message))


def _past(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    old = chance.choice(past) if past else right
    if chance.random() < 0.5:
        return Lie(name, (old,), True)
    return Lie(name, (old, right) if chance.random() < 0.5 else (right, old), True)


def _unasked(chance: random.Random, name: str, message: messages.Message, right: Frame, past: Sequence[Frame]) -> Lie:
    more = tuple(any_message(chance) for _ in range(chance.choice([1, 1, 5])))
    return Lie(name, (*more, right) if chance.random() < 0.5 else (right, *more), _is_stateless(message))


def _is_stateless(message: messages.Message) -> bool:
    """Whether nothing in a reply tells which request it answers."""
    return isinstance(message, messages.ForwardReply | messages.BackwardReply | messages.ReplayReply)


_LIES: dict[str, tuple[int, _Maker]] = {
    "field": (8, _field),
    "payload": (4, _payload),
    "refusal": (6, _refused),
    "another message": (3, _kind),
    "raw": (3, _raw),
    "cut": (2, _cut),
    "never": (1, _never),
    "late": (2, _late),
    "hang up": (2, _gone),
    "again": (2, _again),
    "of the past": (2, _past),
    "unasked": (3, _unasked),
}
