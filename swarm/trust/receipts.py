"""Receipts: what a server has computed for one session, signed with its identity.

A receipt is evidence that anybody can check: which peer says that it has computed what, from what, with which weights
and in which precision. The client compares it with its own record (`swarm.trust.session_record`), and can show it to
others later; the session's id, which the client has drawn at random, keeps it from standing for another session.

A file of receipts is JSON, one object for each server:

    {"format": 1, "receipts": [{"statement": BASE64, "public_key": "ssh-rsa …", "signature": BASE64}, …]}
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from swarm.common.files.atomic_file import read_small
from swarm.data_structures import ServerInfo, Span, WireFormat
from swarm.errors import ProtocolViolation, ReceiptFileError
from swarm.protocol.messages import MAX_SIGNATURE_BYTES, MAX_STATEMENT_BYTES, Receipt, Signed
from swarm.protocol.messages.fields import Checksum, Count, Name, SessionId
from swarm.transport.identity import PublicKey, Signature
from swarm.trust.session_record import Totals

_PREFIX = b"swarm receipt 1\x00"
"""No other signature of a peer covers bytes that begin like this."""

MAX_FILE_BYTES = 4 << 20
FILE_FORMAT = 1

T = TypeVar("T")

_Total = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class ServedBlocks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """With what a server computes a session: its blocks, their weights, and the precision.

    Attributes:
        weights: SHA-256 of the digests of the blocks' weights.
        sparse: whether tokens are computed with some neurons only.
    """

    revision: Name
    start: Count
    end: Count
    weights: Checksum
    dtype: Name
    quantization: Name
    sparse: bool

    @classmethod
    def of(cls, server: ServerInfo, span: Span) -> ServedBlocks:
        """Those of `span` at a server, as it announces them."""
        first = span.start - server.span.start
        digests = server.digests[first : first + span.length]
        return cls(
            server.revision,
            span.start,
            span.end,
            weights_digest(digests),
            server.compute_dtype,
            server.quantization,
            server.sparse,
        )


class Statement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a receipt says.

    Attributes:
        server: peer id of the server that computed.
        client: peer id of the client that it computed for.
        session_id: drawn by the client, for this session at this server only.
        blocks: what computed it.
        reply_format: wire format of the outputs.
        adapters: SHA-256 of the digests of what the client added to the blocks; None for nothing.
        early_exits: whether tokens were allowed to leave inside the span.
        step: number of the last step that is covered.
        steps, tokens, replayed_tokens, given, gave: see `Totals`.
        signed_at: Unix time in seconds, by the server's clock.
    """

    server: Name
    client: Name
    session_id: SessionId
    blocks: ServedBlocks
    reply_format: WireFormat
    adapters: Checksum | None
    early_exits: bool
    step: Count
    steps: _Total
    tokens: _Total
    replayed_tokens: _Total
    given: Checksum
    gave: Checksum
    signed_at: _Total = 0

    @property
    def span(self) -> Span:
        """The blocks."""
        return Span(self.blocks.start, self.blocks.end)


def weights_digest(digests: Sequence[str]) -> bytes:
    """One digest of the weights of successive blocks."""
    return hashlib.sha256("\n".join(digests).encode()).digest()


def make_statement(
    server: str,
    client: str,
    session_id: bytes,
    blocks: ServedBlocks,
    reply_format: WireFormat,
    adapters: Sequence[bytes] | None,
    early_exits: bool,
    totals: Totals,
) -> Statement:
    """What is to be said of a session that has come to `totals`, as both sides know it."""
    added = hashlib.sha256(msgspec.msgpack.encode(list(adapters))).digest() if adapters is not None else None
    return Statement(
        server,
        client,
        session_id,
        blocks,
        reply_format,
        added,
        early_exits,
        totals.number,
        totals.steps,
        totals.tokens,
        totals.replayed_tokens,
        totals.given,
        totals.gave,
    )


def sign_statement(statement: Statement, sign: Callable[[bytes], Signature]) -> Receipt:
    """The receipt of a statement, dated now; `sign` makes its server's signature of some bytes."""
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(statement, signed_at=int(time.time())))
    return Receipt(encoded, *sign(_PREFIX + encoded))


def read_signed(signed: Receipt | Signed, kind: type[T], what: str, prefix: bytes = b"") -> tuple[T, str]:
    """What somebody has signed, and the signer's peer id.

    Raises `ProtocolViolation` if it is no `kind`, or the signature is wrong.

    Args:
        what: its name, for errors.
        prefix: what was signed in front of it.
    """
    try:
        statement = msgspec.msgpack.decode(signed.statement, type=kind)
        key = PublicKey.parse(signed.public_key)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolViolation(f"not a {what}: {error}") from None
    if not key.is_signed(prefix + signed.statement, signed.signature):
        raise ProtocolViolation(f"the signature of the {what} is wrong")
    return statement, key.peer_id


def read_receipt(receipt: Receipt) -> Statement:
    """What a receipt says. Raises `ProtocolViolation` if the server that it names has not signed it."""
    statement, signer = read_signed(receipt, Statement, "receipt", _PREFIX)
    if signer != statement.server:
        raise ProtocolViolation(f"the receipt names {statement.server}, and is signed by {signer}")
    if statement.blocks.end <= statement.blocks.start:
        raise ProtocolViolation("the receipt is of no blocks")
    return statement


def require_same(receipt: Receipt, expected: Statement) -> None:
    """Raise `ProtocolViolation` unless a receipt says what this client knows, at whatever time it was signed."""
    statement = read_receipt(receipt)
    said = msgspec.structs.replace(statement, signed_at=0)
    if said == expected:
        return
    fields = [name for name in Statement.__struct_fields__ if getattr(said, name) != getattr(expected, name)]
    raise ProtocolViolation(f"the receipt differs from this client's record in: {', '.join(fields)}")


# Files


def write_receipts(path: str | Path, receipts: Sequence[Receipt]) -> None:
    """Write receipts to a file. Raises `OSError`."""
    entries = [_FileEntry(one.statement, one.public_key.decode(), one.signature.decode()) for one in receipts]
    content = msgspec.json.encode(_File(FILE_FORMAT, entries))
    Path(path).write_bytes(msgspec.json.format(content, indent=1) + b"\n")


class _FileEntry(msgspec.Struct, forbid_unknown_fields=True):
    statement: Annotated[bytes, msgspec.Meta(max_length=MAX_STATEMENT_BYTES)]  # in base64, as msgspec has bytes in JSON
    public_key: Annotated[str, msgspec.Meta(max_length=MAX_SIGNATURE_BYTES)]
    signature: Annotated[str, msgspec.Meta(max_length=MAX_SIGNATURE_BYTES)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    receipts: list[_FileEntry]


def read_receipts(path: str | Path) -> list[Receipt]:
    """The receipts in a file, whose signatures are not checked yet. Raises `ReceiptFileError`."""
    try:
        parsed = msgspec.json.decode(read_small(Path(path), MAX_FILE_BYTES), type=_File)
        if parsed.format != FILE_FORMAT:
            raise ReceiptFileError(f"{path} has format {parsed.format}; this version reads format {FILE_FORMAT}")
        return [Receipt(one.statement, one.public_key.encode(), one.signature.encode()) for one in parsed.receipts]
    except OSError as error:
        raise ReceiptFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ReceiptFileError(f"{path} is not a file of receipts: {error}") from None


@dataclass(frozen=True)
class RouteReport:
    """What receipts say together.

    Attributes:
        statements: of all receipts with a right signature, by blocks.
        problems: what is wrong with them, in words; empty if nothing is.
        notes: what could not be compared.
    """

    statements: tuple[Statement, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def report_on(receipts: Sequence[Receipt]) -> RouteReport:
    """Check signatures, and whether what each server was given is what the one before it gave. Raises nothing."""
    statements: list[Statement] = []
    problems: list[str] = []
    for number, receipt in enumerate(receipts, 1):
        try:
            statements.append(read_receipt(receipt))
        except ProtocolViolation as error:
            problems.append(f"receipt {number}: {error}")
    statements.sort(key=lambda one: (one.blocks.start, one.signed_at))
    notes: list[str] = []
    for first, second in pairwise(statements):
        where = f"blocks {first.span} and {second.span}"
        if first.client != second.client or first.blocks.revision != second.blocks.revision:
            problems.append(f"{where} were computed for different clients, or of different models")
        elif first.blocks.end != second.blocks.start:
            notes.append(f"{where} do not follow one another")
        elif (first.step, first.replayed_tokens, second.replayed_tokens) != (second.step, 0, 0):
            notes.append(f"{where}: other steps, or a replay, so what one gave cannot be compared with what came next")
        elif first.gave != second.given:
            problems.append(f"{where}: what the second server was given is not what the first one gave")
    return RouteReport(tuple(statements), tuple(problems), tuple(notes))
