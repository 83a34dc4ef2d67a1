"""The exception classes of the whole project.

- An error message says what happened, why, and what to do next, in one line.
- The class says which side has to act: `UsageError` the user of this machine, `RequestRefused` the peer that sent the
  request, `ServerFault` the peer that answered it.
- An error with a `code` can be sent to another peer: a server sends the code and the message, and the client raises the
  same class again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class SwarmError(Exception):
    """Base class of all errors that this project raises on purpose."""


class UsageError(SwarmError):
    """The user asked for something that cannot be done and has to change it. The command line exits with code 2."""


class ModelNotFound(UsageError):
    """The model is neither a local folder with a checkpoint nor a repository on the hub that can be reached."""


class HubUnreachable(ModelNotFound):
    """The model is not on this machine, and the model hub does not answer."""


class NoExitClassifiers(UsageError):
    """None of the model's exit classifiers is for a block at which a server of the route begins."""


class ProcessorsWithState(UsageError):
    """Early exit does not go together with some of the logits processors of the call."""


class CheckpointError(UsageError):
    """The checkpoint exists but cannot be used (no safetensors, missing tensors, broken files)."""


class UnknownWeights(UsageError):
    """Nothing that this machine can read says which weights the model's servers must have."""


class DigestFileError(UsageError):
    """A file with the digests of a model's blocks cannot be used, or is for another model or revision."""


class UnsupportedModel(UsageError):
    """The model's family cannot be cut into spans."""


class InvalidSpan(UsageError):
    """The requested blocks are outside the model, or the range is empty."""


class InvalidOption(UsageError):
    """An option has an invalid value, or one that cannot be used on this machine."""


class NotEnoughMemory(UsageError):
    """The requested blocks do not fit into the device's free memory."""


class NotEnoughSpace(UsageError):
    """The drive has not enough free space for packed files, or for weights that are to be received."""


class WeightsUnavailable(UsageError):
    """The weights cannot be had: no peer shares them, none that is trusted, or they cannot be stored here."""


class PackedFileError(UsageError):
    """A packed file of weights cannot be used (truncated, changed, of another model or format): prepare it again."""


class AddressUnavailable(UsageError):
    """The address to listen on is taken or does not belong to this machine."""


class PeerUnreachable(UsageError):
    """None of the initial peers answered."""


class IdentityError(UsageError):
    """The identity file cannot be used."""


class AdapterError(UsageError):
    """The adapter's files cannot be used (pickled, broken, unsupported, or for modules that the model lacks)."""


class AdapterMismatch(AdapterError):
    """The adapter was trained for another model, or for another revision of this one."""


class ChatTemplateError(UsageError):
    """The model's chat template rejects the conversation."""


class ImageRefused(ChatTemplateError):
    """An image cannot be read, or does not fit the prompt."""


class KeyFileError(UsageError):
    """A gateway's key file cannot be used, or cannot be changed as requested."""


class ReceiptFileError(UsageError):
    """A file of receipts cannot be read."""


class OpinionFileError(UsageError):
    """A file of opinions on servers cannot be read."""


class PointsFileError(UsageError):
    """A file of points cannot be read."""


class MembershipError(UsageError):
    """An invite or an authority's file cannot be used, or the swarm does not accept this peer as a member."""


class WorkerLineError(UsageError):
    """A text is not the line that `swarm worker` prints, or the worker that printed it cannot be used like this."""


class PartitionError(UsageError):
    """A partition does not fit the model or the workers: wrong numbers, or blocks that a device cannot hold."""


class RingFileError(UsageError):
    """The file that describes a ring cannot be used."""


class FolderInUse(UsageError):
    """Another process of this machine uses the folder of this worker, or of this starter."""


class WorkerUnreachable(UsageError):
    """A worker of the ring does not answer."""


class WorkerFailed(SwarmError):
    """A worker could not do what its starter gave it: the message is the worker's own reason."""


class MissingBlocks(SwarmError):
    """No usable server holds some of the blocks that are needed; a server for them has to be started.

    Attributes:
        blocks: indices of the missing blocks, ascending.
        all_wrong: whether servers hold them, but the latest answer of each could not be used.
    """

    def __init__(
        self, blocks: Iterable[int], reason: str = "no server of the swarm holds them", all_wrong: bool = False
    ) -> None:
        self.blocks = tuple(blocks)
        self.all_wrong = all_wrong
        super().__init__(
            f"blocks {format_blocks(self.blocks)} are missing: {reason}. "
            f"Start a server for them (swarm server --blocks {self.blocks[0]}:{self.blocks[-1] + 1}) or wait for one."
        )


class DhtError(SwarmError):
    """The DHT could not be read or written: the network is down, or this peer's libp2p daemon has ended. Try again."""


class ClockDiffers(DhtError):
    """A node of the DHT answered, but its clock differs from this machine's, or it cannot reach this machine."""


class SessionClosed(SwarmError):
    """The caller used an inference session after closing it."""


class NotConnected(SwarmError):
    """The caller used a model after closing its connection, or in a process that was forked from the connected one."""


class RemoteError(SwarmError):
    """An exchange between this peer and another one failed. The subclass says which side has to act.

    Attributes:
        code: name of the error on the wire.
    """

    code: ClassVar[str] = "remote_error"


class PeerLost(RemoteError):
    """The connection to a peer broke, or the peer did not answer in time; use another peer."""

    code = "peer_lost"


class PeerTimeout(PeerLost):
    """The peer did not answer in time; it may still be running."""

    code = "peer_timeout"


class DialerBusy(PeerLost):
    """A peer was not dialed, because all daemons were busy with others. It says nothing about that peer."""

    code = "dialer_busy"


class ProtocolViolation(RemoteError):
    """The other peer sent something that the protocol does not allow: that peer is at fault."""

    code = "protocol_violation"


class NotFiniteOutputs(ProtocolViolation):
    """A server answered with NaN or infinity: it is at fault, or the one whose outputs it computed."""

    code = "not_finite_outputs"


class TooLargeReply(ProtocolViolation):
    """A server's answer is larger than any that it was asked for, and was not read."""

    code = "too_large_reply"


class SuspectOutputs(RemoteError):
    """A server's answer cannot be used, and it is not known whether it or the one before is at fault: use others."""

    code = "suspect_outputs"


class RequestRefused(RemoteError):
    """A server refused a request because the request is wrong: the peer that sent it is at fault."""

    code = "request_refused"


class WrongShape(RequestRefused):
    """The number of values in a message does not match the tokens and the hidden size it declares."""

    code = "wrong_shape"


class WrongDtype(RequestRefused):
    """The message's tensor format is unknown, or the server cannot compute with it."""

    code = "wrong_dtype"


class NotFinite(RequestRefused):
    """The values of a message hold NaN or infinity: the peer that computed them is at fault."""

    code = "not_finite"


class TooLong(RequestRefused):
    """The step or the session is longer than agreed, or longer than the server accepts."""

    code = "too_long"


class UnknownSession(RequestRefused):
    """The server does not know the session: it was never opened, was closed, or has expired. Open it again."""

    code = "unknown_session"


class UnknownAdapter(RequestRefused):
    """The server does not have the adapter: it was never sent, or was removed after its lifetime. Send it again."""

    code = "unknown_adapter"


class AdapterRefused(RequestRefused):
    """The adapter does not fit the blocks, or is larger than the server accepts."""

    code = "adapter_refused"


class TrainingRefused(RequestRefused):
    """The server reads weights from flash and keeps too few of them for gradients. Train over other servers."""

    code = "training_refused"


class WrongPosition(RequestRefused):
    """The step starts after the end of the server's cache, or its number is out of order."""

    code = "wrong_position"


class ExitRefused(RequestRefused):
    """A step lets tokens leave early: in a session that was not opened for it, or where they cannot have left."""

    code = "exit_refused"


class WrongSpan(RequestRefused):
    """The server does not hold the requested blocks, or no longer does."""

    code = "wrong_span"


class NotAMember(RequestRefused):
    """The swarm is private, and the peer did not show that it is a member. The subclass says what was wrong."""

    code = "not_a_member"


class UnknownAuthority(NotAMember):
    """The peer's certificate was not signed by this swarm's authority."""

    code = "unknown_authority"


class MembershipExpired(NotAMember):
    """The peer's certificate has expired: ask for a new invite."""

    code = "membership_expired"


class MembershipRevoked(NotAMember):
    """The authority has revoked the peer's certificate."""

    code = "membership_revoked"


class MembershipNotProven(NotAMember):
    """The peer's signature is not by the certificate's key, or was made for another exchange."""

    code = "membership_not_proven"


class PairingRefused(RequestRefused):
    """A worker does not take this peer as its starter. The subclass says why."""

    code = "pairing_refused"


class WrongSecret(PairingRefused):
    """The starter does not know the worker's pairing secret: copy the line that the worker prints now."""

    code = "wrong_secret"


class PairedWithAnother(PairingRefused):
    """The worker has another starter: end the pairing there, or have the worker forget it."""

    code = "paired_with_another"


class RelayRefused(RequestRefused):
    """A relay grants this peer no place."""

    code = "relay_refused"


class WeightsNotShared(RequestRefused):
    """This peer does not share the weights that were asked for."""

    code = "weights_not_shared"


class ServerFault(RemoteError):
    """A server could not carry out a valid request: the server is at fault."""

    code = "server_fault"


class CacheFull(ServerFault):
    """The server currently has no free space for the session's attention cache."""

    code = "cache_full"


class MemoryFull(CacheFull):
    """The server currently has no free memory for the request, or gives this peer no more of it."""

    code = "memory_full"


class CacheReclaimed(CacheFull):
    """The server has closed the session, because others need its attention cache: go on elsewhere, or here later."""

    code = "cache_reclaimed"


class DriveFailed(ServerFault):
    """The server could not read weights from its drive, or not in time."""

    code = "drive_failed"


class TooManyDownloads(ServerFault):
    """This peer already sends weights to as many others as it allows; ask another peer, or try again later."""

    code = "too_many_downloads"


class WeightsNotReady(ServerFault):
    """This peer is still reading the weights that it shares; ask again later."""

    code = "weights_not_ready"


class ServerClosing(ServerFault):
    """The server is shutting down or moving to other blocks."""

    code = "server_closing"


def _errors_by_code(root: type[RemoteError]) -> dict[str, type[RemoteError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_errors_by_code(child))
    return found


def remote_error(code: str, message: str) -> RemoteError:
    """The exception for a refusal that another peer sent. An unknown code becomes a plain `ServerFault`.

    The message is foreign input that ends up in logs and on terminals, so it is sanitized.
    """
    return _errors_by_code(RemoteError).get(code, ServerFault)(sanitize_text(message))


def sanitize_text(text: str) -> str:
    """Foreign text as one line, with every character replaced that could control a terminal or reverse the text."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def format_blocks(blocks: Iterable[int]) -> str:
    """Block indices as ranges: `[0, 1, 2, 5]` becomes `0:3, 5:6`."""
    ranges: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if ranges and ranges[-1][1] == block:
            ranges[-1] = (ranges[-1][0], block + 1)
        else:
            ranges.append((block, block + 1))
    return ", ".join(f"{start}:{end}" for start, end in ranges)
