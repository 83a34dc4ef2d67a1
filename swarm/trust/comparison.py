"""Whether two servers have computed the same, as far as honest machines do.

Honest machines differ in the last bits: other kernels, other shapes of a forward, sums in another order, rounding for
the wire. So what one has computed is compared with what another one makes of the same inputs, token by token, and the
difference is given in units of the rounding that cannot be avoided: that of the residual stream between blocks, which
adds up like a random walk, as the wire shows it.

    size(token) = |claimed - recomputed| / (|recomputed| * sqrt(r² + r * step)),  r = sqrt(blocks) * rounding

The largest size of a token is in units of 16 bits at least: where the experts of a mixture are chosen, any rounding can
make a token take another one.

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
from swarm.protocol.compression import VALUES_PER_SCALE
from swarm.routing.suspicion import Agreement

WINDOW = 64
"""Tokens over which directions are added up. The sum of more would find smaller systematic differences, and honest
kernels have some."""

MIN_WINDOW = 32
"""Fewer tokens say nothing about coherence."""

_DTYPE_ROUNDING = {"float32": 2.0**-16, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative rounding of one block. In float32 that of sums in another order counts, which is larger."""

_QUANTIZED_ROUNDING = {"int8": 2.0**-8, "int4": 2.0**-9, "nf4": 2.0**-9}
"""At least, with weights in few bits: their kernels round what they are given, too."""

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
        worst: size of a token beyond which it may be a lie, in units of 16 bits at least; or it has taken another
            expert, because of a rounding.
        wrong: size of a token beyond which it is one.
        unrelated: median size beyond which one comparison is proof enough.
    """

    typical: float = 5.0
    coherence: float = 4.5
    negligible: float = 0.5
    worst: float = 30.0
    wrong: float = 100.0
    unrelated: float = 30.0


TOLERANCE = Tolerance()

_COARSE_WIRE = Tolerance(coherence=2.5)
"""Over a wire of 8 bits, which rounds at random what honest kernels round in the same way."""

_SHARED_SCALES = Tolerance(coherence=6.0)
"""Over the same wire, where tokens share their scale with others."""

_QUANTIZED = Tolerance(typical=12.0, coherence=math.inf)
"""With weights in few bits: kernels differ in what they round besides, and how."""


def tolerance_of(quantization: str, wire: WireFormat, hidden: int) -> Tolerance:
    """How far honest machines differ that compute in the same form and send in the same format.

    Args:
        hidden: width of the model.
    """
    if quantization in _QUANTIZED_ROUNDING:
        return _QUANTIZED
    if _shares_scales(wire, hidden):
        return _SHARED_SCALES
    return _COARSE_WIRE if wire is WireFormat.BLOCKWISE8 else TOLERANCE


def _shares_scales(wire: WireFormat, hidden: int) -> bool:
    """Whether tokens travel in blocks of values with others, which are not the same ones in two results."""
    return wire is WireFormat.BLOCKWISE8 and hidden % VALUES_PER_SCALE > 0


@dataclass(frozen=True)
class Difference:
    """How far two results differ.

    Attributes:
        tokens: how many were compared.
        typical, coherence, worst: see `Tolerance`. Coherence is 0 for too few tokens.
        tolerance: how far honest machines differ here.
    """

    tokens: int
    typical: float
    coherence: float
    worst: float
    tolerance: Tolerance = TOLERANCE

    @property
    def agreement(self) -> Agreement:
        """What comes of it. NaN agrees with nothing."""
        tolerance = self.tolerance
        if not self.typical < tolerance.unrelated or not math.isfinite(self.worst):
            return Agreement.UNRELATED
        is_systematic = self.typical > tolerance.negligible and self.coherence > tolerance.coherence
        if self.typical > tolerance.typical or is_systematic or self.worst > tolerance.wrong:
            return Agreement.DIFFERENT
        return Agreement.SAME if self.worst <= tolerance.worst else Agreement.DOUBTFUL


def difference(
    claimed_TH: torch.Tensor,
    recomputed_TH: torch.Tensor,
    blocks: int,
    dtype: str,
    quantization: str,
    wire: WireFormat,
) -> Difference:
    """How far two results of the same inputs differ.

    Args:
        claimed_TH, recomputed_TH: outputs of the same tokens in the same order.
        blocks: that computed them.
        dtype, quantization: in which both have computed, as they announce it; an unknown dtype counts as 16 bits.
        wire: format in which both have come.
    """
    claimed_TH, recomputed_TH = claimed_TH.double(), recomputed_TH.double()
    error_TH = claimed_TH - recomputed_TH
    of_dtype = _DTYPE_ROUNDING.get(dtype, _DTYPE_ROUNDING["bfloat16"])
    rounding = math.sqrt(blocks) * max(of_dtype, _QUANTIZED_ROUNDING.get(quantization, 0.0))
    size_T = error_TH.norm(dim=1)
    relative_T = size_T / recomputed_TH.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    hidden, coarse = claimed_TH.shape[1], max(rounding, math.sqrt(blocks) * _DTYPE_ROUNDING["bfloat16"])
    typical = float(relative_T.median()) / _unit(rounding, wire, hidden)
    worst = float(relative_T.max()) / _unit(coarse, wire, hidden)
    coherence = _coherence(error_TH, size_T)
    tolerance = tolerance_of(quantization, wire, hidden)
    return Difference(len(size_T), typical, coherence, worst, tolerance)


def _unit(rounding: float, wire: WireFormat, hidden: int) -> float:
    step = _WIRE_STEP[wire]
    if _shares_scales(wire, hidden):
        return math.sqrt(rounding**2 + step**2)
    return math.sqrt(rounding**2 + rounding * step)


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
        return one != other and pairs[frozenset((one, other))].agreement is Agreement.SAME

    friends = {peer: [other for other in peers if agrees(peer, other)] for peer in peers}
    best = max(peers, key=lambda peer: len(friends[peer]))
    if not friends[best]:
        return None
    said: Verdict = {}
    for peer in peers:
        found = pairs[frozenset((peer, best if peer != best else friends[best][0]))]
        said[peer] = found.agreement, found
    return said


def _coherence(error_TH: torch.Tensor, size_T: torch.Tensor) -> float:
    differing = size_T > 0
    if int(differing.sum()) < MIN_WINDOW:
        return 0.0
    direction_TH = error_TH[differing] / size_T[differing].unsqueeze(1)
    windows = [window for window in direction_TH.split(WINDOW) if len(window) >= MIN_WINDOW]
    return sum(float(window.sum(0).norm() ** 2) / len(window) for window in windows) / len(windows)
