"""What all instruments share: buckets of histograms, and labels that cannot grow without end.

Laws:
- A label's values come from a short list in this program, or from what its owner configured. What peers or users send
  (peer ids, session ids, texts, names of models that nobody serves) is never one.
- Times are in seconds, sizes in bytes; counters end in `_total`.
"""

from __future__ import annotations

from collections.abc import Collection

from swarm.errors import RemoteError

OTHER = "other"
"""Label of whatever is not in a list."""

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From a small server's decode step to a long prompt's."""

ANSWER_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
"""What people wait for: a first token, an answer, a failover."""

ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


def bounded(value: str, known: Collection[str]) -> str:
    """The value if it is one of the known ones, else `OTHER`."""
    return value if value in known else OTHER


def error_label(code: str) -> str:
    """The name of an error of `swarm.errors` that travels."""
    return bounded(code, _ERROR_CODES)


def _codes(root: type[RemoteError]) -> frozenset[str]:
    return frozenset({root.code}).union(*map(_codes, root.__subclasses__()))


_ERROR_CODES = _codes(RemoteError)
