from __future__ import annotations

import math

import pytest

from swarm.common.units import ByteSize, BytesPerSecond, Duration, format_bytes


def test_sizes() -> None:
    for text, size in [
        ("8GB", 8 * 10**9),
        ("512 MiB", 512 << 20),
        ("1.5 gb", 1_500_000_000),
        ("2TiB", 2 << 40),
        ("17", 17),
        (17, 17),
        (1e9, 10**9),
        ("8e9", 8 * 10**9),
        (" 3 kB ", 3000),
        (0, 0),
    ]:
        assert ByteSize.parse(text) == size


def test_rates() -> None:
    for text, rate in [
        ("100 Mbit/s", 12.5e6),
        ("1Gbit/s", 125e6),
        ("20 Mbps", 2.5e6),
        ("12 MB/s", 12e6),
        ("1 MiB/s", 1 << 20),
        (9, 9),
    ]:
        assert BytesPerSecond.parse(text) == rate


def test_times() -> None:
    for text, seconds in [("5 ms", 0.005), ("0.2s", 0.2), ("80us", 8e-5), ("80 µs", 8e-5), (1, 1)]:
        assert Duration.parse(text) == pytest.approx(seconds)


def test_what_is_no_size() -> None:
    for value in ["8 QB", "GB", "-1 GB", "", "1 2 GB", "9" * 400, True, None, [], math.nan, math.inf, -1]:
        with pytest.raises(ValueError, match="is not a size such as 8GB or 512 MiB"):
            ByteSize.parse(value)


def test_what_is_no_rate() -> None:
    for value in ["100 MB", "0", 0, "5 ms", math.nan]:
        with pytest.raises(ValueError, match="is not a bandwidth"):
            BytesPerSecond.parse(value)


def test_what_is_no_time() -> None:
    for value in ["5 min", -1, "2000000 s", math.inf]:
        with pytest.raises(ValueError, match="is not a time"):
            Duration.parse(value)


def test_bytes_for_people():
    for size, text in [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1_440_000_000, "1.44 GB"), (3.2e15, "3.2e+03 TB")]:
        assert format_bytes(size) == text
