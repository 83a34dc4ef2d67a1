"""One exception tree for the whole project.

Laws:
- An error says what happened, why, and what to do next, in one line.
- Its class says who has to act: `UsageError` the person at this machine, `RequestRefused` the peer that sent the
  request, `ServerFault` the peer that answered it.
- Errors with a `code` travel: a server encodes the code and the message, the client raises the same class again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class SwarmError(Exception):
    """Base class of every error that this project raises on purpose."""


class UsageError(SwarmError):
    """Something that the person at this machine asked for cannot be done. The command line exits with code 2."""


class ModelNotFound(UsageError):
    """The model is neither a local folder with a checkpoint nor a repository that can be reached."""


class CheckpointError(UsageError):
    """The checkpoint exists but cannot be used (no safetensors, missing tensors, broken files)."""


class UnsupportedModel(UsageError):
    """The model's family cannot be cut into spans."""


class InvalidSpan(UsageError):
    """The requested blocks lie outside the model, or the range is empty."""


class InvalidOption(UsageError):
    """An option has a value that cannot be used on this machine."""


class NotEnoughMemory(UsageError):
    """The blocks asked for do not fit into the device's free memory."""


class AddressUnavailable(UsageError):
    """The address to listen on is taken or does not exist here."""


class PeerUnreachable(UsageError):
    """None of the initial peers answered."""


class IdentityError(UsageError):
    """The identity file cannot be used."""


class AdapterError(UsageError):
    """The adapter's files cannot be used (pickled, broken, of another form, for modules that the model has not)."""


class AdapterMismatch(AdapterError):
    """The adapter was trained for another model, or for another revision of this one."""


class ChatTemplateError(UsageError):
    """The model's chat template cannot write such a conversation, as it says itself."""


class ScenarioError(UsageError):
    """The description of a simulation cannot be used."""


class KeyFileError(UsageError):
    """The file of a gateway's keys cannot be used, or not be changed as wanted."""


class MissingBlocks(SwarmError):
    """No server holds some of the blocks that are needed.

    Attributes:
        blocks: indices of the missing blocks, ascending.
    """

    def __init__(self, blocks: Iterable[int], why: str = "no server of the swarm holds them") -> None:
        self.blocks = tuple(blocks)
        super().__init__(
            f"blocks {format_blocks(self.blocks)} are missing: {why}. "
            f"Start a server for them (swarm server --blocks {self.blocks[0]}:{self.blocks[-1] + 1}) or wait for one."
        )


class SessionClosed(SwarmError):
    """The inference session was used after it had been closed."""


class RemoteError(SwarmError):
    """Something went wrong between this peer and another one.

    Attributes:
        code: the name that travels on the wire.
    """

    code: ClassVar[str] = "remote_error"


class PeerLost(RemoteError):
    """The connection to a peer broke, or the peer did not answer in time."""

    code = "peer_lost"


class PeerTimeout(PeerLost):
    """The peer did not answer in time; whether it is still there is not known."""

    code = "peer_timeout"


class ProtocolViolation(RemoteError):
    """The other side sent something that the protocol does not allow: the other side is at fault."""

    code = "protocol_violation"


class RequestRefused(RemoteError):
    """A server refused a request because the request is wrong: the requesting side is at fault."""

    code = "request_refused"


class WrongShape(RequestRefused):
    """The number of values in a message does not match the tokens and the hidden size it declares."""

    code = "wrong_shape"


class WrongDtype(RequestRefused):
    """The message's tensor format is unknown, or the server cannot compute with it."""

    code = "wrong_dtype"


class NotFinite(RequestRefused):
    """The hidden states hold NaN or infinity: whoever computed them is at fault."""

    code = "not_finite"


class TooLong(RequestRefused):
    """The step or the session is longer than what was agreed or than what the server accepts."""

    code = "too_long"


class UnknownSession(RequestRefused):
    """The server does not know the session: it was never opened, was closed, or has expired."""

    code = "unknown_session"


class UnknownAdapter(RequestRefused):
    """The server does not have the adapter: it was never sent, or has left after its time. It can be sent again."""

    code = "unknown_adapter"


class AdapterRefused(RequestRefused):
    """The adapter does not fit to the blocks, or is larger than what the server takes."""

    code = "adapter_refused"


class WrongPosition(RequestRefused):
    """The step starts behind what the server has in its cache, or its number is out of order."""

    code = "wrong_position"


class WrongSpan(RequestRefused):
    """The server does not hold the requested blocks (any more)."""

    code = "wrong_span"


class ServerFault(RemoteError):
    """A server could not do what it was rightly asked to do: the server is at fault."""

    code = "server_fault"


class CacheFull(ServerFault):
    """The server has no room for the session's attention cache at present."""

    code = "cache_full"


class ServerClosing(ServerFault):
    """The server is shutting down or moving to other blocks."""

    code = "server_closing"


def _travelling(root: type[RemoteError]) -> dict[str, type[RemoteError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_travelling(child))
    return found


def remote_error(code: str, message: str) -> RemoteError:
    """The exception for a refusal that came over the wire; an unknown code becomes a plain `ServerFault`.

    Strangers wrote the message, and it ends in logs and on terminals: it stays one line, and commands nothing.
    """
    return _travelling(RemoteError).get(code, ServerFault)(sanitize_text(message))


def sanitize_text(text: str) -> str:
    """Text of a stranger as one line, without what would move a terminal's cursor or turn letters around."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def format_blocks(blocks: Iterable[int]) -> str:
    """Block indices as ranges: `[0, 1, 2, 5]` becomes `0:3, 5:6`."""
    ranges: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if ranges and ranges[-1][1] == block:
            ranges[-1] = (ranges[-1][0], block + 1)
        else:
            ranges.append((block, block + 1))
    return ", ".join(f"{start}:{end}" for start, end in ranges)
