from __future__ import annotations

import math

import pytest

from swarm.common.units import ByteSize, BytesPerSecond, Duration, format_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9), ("512 MiB", 512 << 20), ("1.5 gb", 1_500_000_000), ("2TiB", 2 << 40), ("17", 17),
        (17, 17), (1e9, 10**9), ("8e9", 8 * 10**9), (" 3 kB ", 3000), (0, 0),
    ],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    assert ByteSize.parse(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100 Mbit/s", 12.5e6), ("1Gbit/s", 125e6), ("20 Mbps", 2.5e6), ("12 MB/s", 12e6), ("1 MiB/s", 1 << 20), (9, 9)],
)
def test_rates(text: object, rate: float) -> None:
    assert BytesPerSecond.parse(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("5 ms", 0.005), ("0.2s", 0.2), ("80us", 8e-5), ("80 µs", 8e-5), (1, 1)])
def test_times(text: object, seconds: float) -> None:
    assert Duration.parse(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", ["8 QB", "GB", "-1 GB", "", "1 2 GB", "9" * 400, True, None, [], math.nan, math.inf, -1]
)
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size such as 8GB or 512 MiB"):
        ByteSize.parse(value)


@pytest.mark.parametrize("value", ["100 MB", "0", 0, "5 ms", math.nan])
def test_what_is_no_rate(value: object) -> None:
    with pytest.raises(ValueError, match="is not a bandwidth"):
        BytesPerSecond.parse(value)


@pytest.mark.parametrize("value", ["5 min", -1, "2000000 s", math.inf])
def test_what_is_no_time(value: object) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        Duration.parse(value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1_440_000_000, "1.44 GB"), (3.2e15, "3.2e+03 TB")],
)
def test_bytes_for_people(size, text):
    assert format_bytes(size) == text
