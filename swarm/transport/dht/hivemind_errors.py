"""The one place that expects any exception of hivemind's DHT and turns it into a typed error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from swarm.errors import DhtError, ProtocolViolation, SwarmError


@contextmanager
def raise_dht_errors(action: str) -> Iterator[None]:
    """Raise `DhtError` for whatever an access to the DHT raises, and `ProtocolViolation` if another node has answered
    with something else than an answer. Errors of this project and cancellation pass.

    hivemind does not document what its DHT raises. While the network is down, or once the libp2p daemon is gone, errors
    of the daemon's client, of asyncio and of the operating system have been seen.

    Args:
        action: what was tried, for the message, such as "reading the announcements".
    """
    try:
        yield
    except SwarmError:
        raise
    except DecodeError as error:
        raise ProtocolViolation(f"{action} failed: what a node answered is no answer of the DHT: {error}") from None
    except Exception as error:
        raise DhtError(f"{action} failed: {error!r}") from error
