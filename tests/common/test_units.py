from __future__ import annotations

import math

import pytest

from swarm.common.units import ByteSize, BytesPerSecond, Duration, format_bytes


def test_sizes() -> None:
    for text, size in {
        "8GB": 8 * 10**9, "512 MiB": 512 << 20, "1.5 gb": 1_500_000_000, "17": 17, "8e9": 8 * 10**9, " 3 kB ": 3000,
    }.items():  # fmt: skip
        assert ByteSize.parse(text) == size
    for number in (17, 1e9, 0):
        assert ByteSize.parse(number) == number


def test_rates_and_times() -> None:
    for text, rate in {"100 Mbit/s": 12.5e6, "20 Mbps": 2.5e6, "12 MB/s": 12e6, "1 MiB/s": 1 << 20}.items():
        assert BytesPerSecond.parse(text) == rate
    for text, seconds in {"5 ms": 0.005, "0.2s": 0.2, "80us": 8e-5, "80 µs": 8e-5}.items():
        assert Duration.parse(text) == pytest.approx(seconds)


def test_what_is_none() -> None:
    for kind, said, values in (
        (
            ByteSize,
            "a size such as 8GB or 512 MiB",
            ("8 QB", "GB", "-1 GB", "", "9" * 400, True, None, [], math.nan, -1),
        ),
        (BytesPerSecond, "a bandwidth", ("100 MB", "0", 0, "5 ms", math.nan)),
        (Duration, "a time", ("5 min", -1, "2000000 s", math.inf)),
    ):
        for value in values:
            with pytest.raises(ValueError, match=f"is not {said}"):
                kind.parse(value)


def test_bytes_for_people() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 KB", 1_440_000_000: "1.44 GB", 3.2e15: "3.2e+03 TB"}
    assert [format_bytes(size) for size in sizes] == list(sizes.values())
