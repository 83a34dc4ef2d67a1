"""Messages that measure a link and ask for a server's state, and the refusal that may answer any request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm.protocol.messages.fields import MAX_PROBE_BYTES, Count, Message, Name, Text


class InfoRequest(Message, frozen=True):
    """Ask a server what it is doing now."""


class InfoReply(Message, frozen=True):
    """What a server is doing now. It is also the cheapest exchange with which to measure a round trip."""

    start: Count
    end: Count
    cache_tokens_free: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    sessions: Count
    version: Name


class ProbeRequest(Message, frozen=True):
    """Measure the link: the payload (at most `MAX_PROBE_BYTES`) is thrown away, `reply_bytes` bytes come back."""

    reply_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROBE_BYTES)]


class ProbeReply(Message, frozen=True):
    """The answer to a probe, with the requested number of payload bytes."""


class Refusal(Message, frozen=True):
    """The request failed with a typed error (see `swarm.errors`); `step` is the number of the refused step."""

    code: Name
    message: Text
    step: Count | None = None
