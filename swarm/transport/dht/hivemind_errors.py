"""The one place that expects any exception of hivemind's DHT and turns it into a typed error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from swarm.errors import DhtError, ProtocolViolation, SwarmError


@contextmanager
def raise_dht_errors(action: str) -> Iterator[None]:
    """Raise `DhtError` for whatever an access to the DHT raises, `ProtocolViolation` for an answer that is none.

    hivemind does not document its errors: those of the daemon's client, of asyncio and of the operating system have
    been seen. Errors of this project and cancellation pass. `action` says in the message what was tried.
    """
    try:
        yield
    except SwarmError:
        raise
    except DecodeError as error:
        raise ProtocolViolation(f"{action} failed: what a node answered is no answer of the DHT: {error}") from None
    except Exception as error:
        raise DhtError(f"{action} failed: {error!r}") from error
