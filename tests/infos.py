"""Announcements for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarm.data_structures import ServerInfo, ServerState, Span


def server_info(start: int, end: int, peer_id: str = "peer", **changes: Any) -> ServerInfo:
    """An online server of blocks [start, end) that computes one block a second."""
    info = ServerInfo(
        peer_id=peer_id,
        span=Span(start, end),
        state=ServerState.ONLINE,
        throughput=1.0,
        cache_tokens_free=1 << 20,
        revision="main",
        digests=("0123456789ab",) * (end - start),
        compute_dtype="float32",
        quantization="none",
        version="1",
    )
    return replace(info, **changes)
