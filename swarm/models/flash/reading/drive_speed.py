"""How fast a drive reads, by the size of the reads and by how many are begun together. Pure.

The cost model needs nothing else of a drive. `drive_measurement` measures it; the shape of the result is the one of
figure 2b of "LLM in a flash".
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class DriveSpeed:
    """Measured times of batches of random reads: begun together, waited for until the last one has arrived.

    Encoded and decoded by msgspec. Raises `ValueError` if the grid is incomplete or a time is not positive.

    Attributes:
        io: how the file was read, "direct" or "cached".
        batch_reads: how many reads were begun together, ascending.
        read_bytes: the sizes of the reads, ascending.
        batch_seconds: `[read_bytes, batch_reads]`: the median time of such a batch.
    """

    io: str
    batch_reads: tuple[int, ...]
    read_bytes: tuple[int, ...]
    batch_seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.batch_reads, self.read_bytes):
            if not axis or axis[0] <= 0 or any(low >= high for low, high in pairwise(axis)):
                raise ValueError("the counts and the sizes of a drive's speed have to be positive and ascending")
        if [len(row) for row in self.batch_seconds] != [len(self.batch_reads)] * len(self.read_bytes):
            raise ValueError("a drive's speed needs a time for each size and each number of reads")
        if not all(0 < seconds < float("inf") for row in self.batch_seconds for seconds in row):
            raise ValueError("the times of a drive's speed have to be positive")

    def seconds(self, reads: float, bytes_each: float) -> float:
        """The expected time from beginning `reads` reads of `bytes_each` until the last has arrived.

        Linear between the measured points. More reads than were measured go on at the rate of the last step, since a
        batch's beginning and end count once; larger ones at the bandwidth of the largest size; smaller ones take as
        long as the smallest.
        """
        if reads <= 0 or bytes_each <= 0:
            return 0.0
        if bytes_each > self.read_bytes[-1]:
            reads, bytes_each = reads * bytes_each / self.read_bytes[-1], self.read_bytes[-1]
        if reads > self.batch_reads[-1]:
            return self._beyond(reads, bytes_each)
        by_size = [_interpolate(reads, self.batch_reads, row) for row in self.batch_seconds]
        return _interpolate(bytes_each, self.read_bytes, by_size)

    def _beyond(self, reads: float, bytes_each: float) -> float:
        most = self.batch_reads[-1]
        largest_s = self.seconds(most, bytes_each)
        mean_s = step_s = largest_s / most
        if len(self.batch_reads) > 1:
            before = self.batch_reads[-2]
            step_s = (largest_s - self.seconds(before, bytes_each)) / (most - before)
        # A measurement may be disturbed; no drive gains more from a longer batch than this.
        return largest_s + (reads - most) * min(mean_s, max(step_s, mean_s / 2))

    def bytes_per_second(self, bytes_each: float) -> float:
        """The bandwidth of random reads of this size, with as many in flight as were measured."""
        reads = self.batch_reads[-1]
        return reads * bytes_each / self.seconds(reads, bytes_each)


def _interpolate(place: float, places: tuple[int, ...], values: tuple[float, ...] | list[float]) -> float:
    """The value at `place`, linear between the given ones, and constant outside them."""
    above = bisect.bisect_left(places, place)
    if above == 0:
        return values[0]
    if above == len(places):
        return values[-1]
    share = (place - places[above - 1]) / (places[above] - places[above - 1])
    return values[above - 1] + share * (values[above] - values[above - 1])
