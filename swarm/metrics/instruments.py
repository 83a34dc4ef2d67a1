"""What all metrics share: histogram buckets, and labels with a bounded number of values.

Rules:
- A label's values come from a short list in this program, or from the operator's configuration. Nothing that peers or
  users send (peer ids, session ids, texts, names of unknown models) becomes a label.
- Times are in seconds, sizes in bytes; counters end in `_total`.
"""

from __future__ import annotations

from collections.abc import Collection

from swarm.errors import RemoteError

OTHER = "other"
"""Label for all values that are not in the list."""

STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From a decode step on a small span to a long prompt."""

ANSWER_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
"""Times that users wait: for a first token, an answer, a failover."""

SEQUENCE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
TOKEN_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


def label_or_other(value: str, known: Collection[str]) -> str:
    """The value if it is known, else `OTHER`."""
    return value if value in known else OTHER


def error_label(code: str) -> str:
    """The label for the code of a `RemoteError`."""
    return label_or_other(code, _ERROR_CODES)


def _codes(root: type[RemoteError]) -> frozenset[str]:
    return frozenset({root.code}).union(*map(_codes, root.__subclasses__()))


_ERROR_CODES = _codes(RemoteError)
