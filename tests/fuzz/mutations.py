"""Messages with one thing wrong: values from the edges of what is allowed, and of what integers and lists can be."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

INTEGERS = (
    *(-(2**63), -(2**31) - 1, -(2**31), -1, 0, 1, 2, 3, 7, 8, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4095, 4096),
    *(4097, 16383, 16384, 16385, 2**16, 2**20, 2**24, 2**24 + 1, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(2**48, 2**63 - 1, 2**63, 2**64 - 1),
)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 5e-324, 0.5, 1.0, 1.0000001, 60.0, 1e9, 1.1e9, 1e308)
TEXTS = ("", "none", "float32", "float16", "bfloat16", "float17", "blockwise8", "\x00", "a" * 257, "é" * 256, "../..")
MAX_BYTES = 4096


def integer(random: random.Random, *near: int) -> int:
    """A boundary, or something close to one of the values that would be right."""
    if near and random.random() < 0.5:
        return min(max(random.choice(near) + random.choice((-2, -1, 0, 1, 2)), INTEGERS[0]), INTEGERS[-1])
    return random.choice(INTEGERS)


def anything(random: random.Random, depth: int = 0) -> Any:
    """A value of any type."""
    kind = random.randrange(9 if depth < 3 else 6)
    match kind:
        case 0:
            return integer(random)
        case 1:
            return random.choice(FLOATS)
        case 2:
            return random.choice(TEXTS)
        case 3:
            return random.randbytes(random.choice((0, 1, 15, 16, 17, 63, 512)))
        case 4:
            return None
        case 5:
            return bool(random.getrandbits(1))
        case 6:
            return [anything(random, depth + 1) for _ in range(random.choice((0, 1, 2, 5)))]
        case 7:
            return {str(number): anything(random, depth + 1) for number in range(random.choice((0, 1, 3)))}
        case _:
            nested: Any = []
            for _ in range(random.choice((2, 100, 500))):
                nested = [nested]
            return nested


def other_value(random: random.Random, value: Any) -> Any:
    """Something else in the place of `value`, most often of the same type."""
    if random.random() < 0.1:
        return anything(random)
    match value:
        case bool():
            return not value
        case int():
            return integer(random, value)
        case float():
            return random.choice(FLOATS)
        case str():
            return random.choice(TEXTS)
        case bytes():
            cut = random.randrange(len(value) + 1)
            return random.choice((value[:cut], value + b"\x00", random.randbytes(len(value)), b"", value * 2))
        case list() | tuple():
            return _other_list(random, list(value))
        case msgspec.Struct():
            return mutated(random, value)
    return random.choice((0, 1, [0], [1, 0], [2**31 - 1], b"", "", None))


def _other_list(random: random.Random, values: list[Any]) -> list[Any]:
    match random.randrange(6):
        case 0 if values:
            values.pop(random.randrange(len(values)))
        case 1:
            values.insert(random.randrange(len(values) + 1), random.choice(values) if values else integer(random))
        case 2:
            values = values * random.choice((0, 2, 3))
        case 3 if values:
            values = (values * (4097 // len(values) + 1))[: random.choice((4096, 4097))]
        case _ if values:
            at = random.randrange(len(values))
            values[at] = other_value(random, values[at])
    return values


def mutated(random: random.Random, message: Any) -> Any:
    """`message` with another value in one or two of its fields."""
    fields = message.__struct_fields__
    if not fields:
        return message
    for _ in range(random.choice((1, 1, 1, 2))):
        name = random.choice(fields)
        message = msgspec.structs.replace(message, **{name: other_value(random, getattr(message, name))})
    return message


def broken_bytes(random: random.Random, data: bytes) -> bytes:
    """`data` with bits flipped, a piece cut out, doubled, or put in."""
    at = random.randrange(len(data) + 1)
    to = min(len(data), at + random.choice((1, 1, 2, 4, 8, 64)))
    match random.randrange(5):
        case 0 if at < len(data):
            return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + data[to:]
        case 2:
            return data[:to] + data[at:]
        case 3:
            return data[:at] + random.randbytes(random.choice((1, 2, 8, 100))) + data[at:]
        case _:
            return data[:at]
