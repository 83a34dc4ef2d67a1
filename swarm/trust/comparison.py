"""Whether two servers have computed the same, as far as honest machines do.

Honest machines differ in the last bits: other kernels, other shapes of a forward, sums in another order, rounding for
the wire. So what one has computed is compared with what another one makes of the same inputs, token by token, and the
difference is given in units of the rounding that cannot be avoided: that of the residual stream between blocks, which
adds up like a random walk, as the wire shows it.

    size(token) = |claimed - recomputed| / (|recomputed| * sqrt(r² + r * step)),  r = sqrt(blocks) * rounding

`step` is that between two values that the wire can carry: of a difference of r, a share of r / step crosses over to
the next one, and then counts as a whole step.

Rounding is different for every token. Other weights are not: what they change lies in the same directions for many
tokens. So the directions of the differences are added up, window by window:

    coherence = |sum of directions|² / tokens, 1 if they are independent, up to the number of tokens if they are equal

That tells 8-bit weights from 16-bit ones, whose differences are hardly larger than rounding. `docs/trust.md` has the
table of both figures for honest machines and for frauds, by `scripts/calibrate_audit.py`. TOPLOC (arXiv 2501.16007)
compares the largest values only, because its verifier gets a digest; a client here has all values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm.data_structures import WireFormat
from swarm.routing.suspicion import Agreement

WINDOW = 64
"""Tokens over which directions are added up. The sum of more would find smaller systematic differences, and honest
kernels have some."""

MIN_WINDOW = 32
"""Fewer tokens say nothing about coherence."""

_DTYPE_ROUNDING = {"float32": 2.0**-16, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative rounding of one block. In float32 that of sums in another order counts, which is larger."""

_WIRE_STEP = {
    WireFormat.NONE: 0.0,
    WireFormat.FLOAT16: 2.0**-11,
    WireFormat.BFLOAT16: 2.0**-8,
    WireFormat.BLOCKWISE8: 2.0**-6,
}
"""Relative to the size of a value; in 8 bits, to the mean of a block of values."""


@dataclass(frozen=True)
class Tolerance:
    """How far honest machines differ.

    Attributes:
        typical: median size.
        coherence: mean over the windows.
        negligible: median size below which coherence says nothing: honest kernels add up sums in other orders, the same
            for all tokens.
        worst: largest size of a token.
        unrelated: median size beyond which one comparison is proof enough.
    """

    typical: float = 2.2
    coherence: float = 2.6
    negligible: float = 0.5
    worst: float = 30.0
    unrelated: float = 30.0


TOLERANCE = Tolerance()


@dataclass(frozen=True)
class Difference:
    """How far two results differ.

    Attributes:
        tokens: how many were compared.
        typical, coherence, worst: see `Tolerance`. Coherence is 0 for too few tokens.
    """

    tokens: int
    typical: float
    coherence: float
    worst: float

    def agreement(self, tolerance: Tolerance) -> Agreement:
        """What comes of it. NaN agrees with nothing."""
        if not self.typical < tolerance.unrelated or not math.isfinite(self.worst):
            return Agreement.UNRELATED
        is_systematic = self.typical > tolerance.negligible and self.coherence > tolerance.coherence
        within = self.typical <= tolerance.typical and not is_systematic and self.worst <= tolerance.worst
        return Agreement.SAME if within else Agreement.DIFFERENT


def difference(
    claimed_TH: torch.Tensor, recomputed_TH: torch.Tensor, blocks: int, dtype: str, wire: WireFormat
) -> Difference:
    """How far two results of the same inputs differ.

    Args:
        claimed_TH, recomputed_TH: outputs of the same tokens in the same order.
        blocks: that computed them.
        dtype: in which both have computed, as they announce it; an unknown one counts as 16 bits.
        wire: format in which both have come.
    """
    claimed_TH, recomputed_TH = claimed_TH.double(), recomputed_TH.double()
    error_TH = claimed_TH - recomputed_TH
    rounding = math.sqrt(blocks) * _DTYPE_ROUNDING.get(dtype, _DTYPE_ROUNDING["bfloat16"])
    unit = math.sqrt(rounding**2 + rounding * _WIRE_STEP[wire])
    size_T = error_TH.norm(dim=1)
    relative_T = size_T / (recomputed_TH.norm(dim=1) * unit).clamp_min(torch.finfo(torch.float32).tiny)
    return Difference(len(size_T), float(relative_T.median()), _coherence(error_TH, size_T), float(relative_T.max()))


Verdict = dict[str, tuple[Agreement, Difference]]
"""What an audit says of each server that took part, and how far it differs from one that agrees with another."""


def majority(peers: Sequence[str], compare: Callable[[str, str], Difference]) -> Verdict | None:
    """What follows from the results of some servers; None as long as no two of them agree.

    Args:
        peers: the servers, in the order in which they were asked.
        compare: how far the results of two of them differ.
    """
    pairs = {frozenset(pair): compare(*pair) for pair in itertools.combinations(peers, 2)}

    def agrees(one: str, other: str) -> bool:
        return one != other and pairs[frozenset((one, other))].agreement(TOLERANCE) is Agreement.SAME

    friends = {peer: [other for other in peers if agrees(peer, other)] for peer in peers}
    best = max(peers, key=lambda peer: len(friends[peer]))
    if not friends[best]:
        return None
    said: Verdict = {}
    for peer in peers:
        found = pairs[frozenset((peer, best if peer != best else friends[best][0]))]
        said[peer] = found.agreement(TOLERANCE), found
    return said


def _coherence(error_TH: torch.Tensor, size_T: torch.Tensor) -> float:
    differing = size_T > 0
    if int(differing.sum()) < MIN_WINDOW:
        return 0.0
    direction_TH = error_TH[differing] / size_T[differing].unsqueeze(1)
    windows = [window for window in direction_TH.split(WINDOW) if len(window) >= MIN_WINDOW]
    return sum(float(window.sum(0).norm() ** 2) / len(window) for window in windows) / len(windows)
