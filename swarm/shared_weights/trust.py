"""Which digests the parts of a model must have, before any of them is taken from a peer.

They come from a file of `swarm digest --for-peers`, made where all weights are: given by the user, or pinned at an
earlier first use. Where the user believes the peers that are met first, or the swarm is private, what all of them say
is pinned. Peers are never outvoted: where they disagree, nothing is believed. The bytes themselves are compared with
the digests where they are kept, in `part_store`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from swarm.common.files.folders import cache_folder
from swarm.errors import DigestFileError, RemoteError, UnknownWeights, WeightsUnavailable
from swarm.models.checkpoints.known_digests import encode_digest_file, read_digest_file, write_digest_file
from swarm.shared_weights.fetcher import MAX_HOLDERS, FindHolders, OpenStream
from swarm.shared_weights.holder_stream import HolderStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrustedParts:
    """What the parts of a model must be.

    Attributes:
        revision: see `Checkpoint`.
        blocks: of the whole model.
        digests: by part.
    """

    revision: str
    blocks: int
    digests: Mapping[str, str]


def trusted_by_file(model: str, path: Path, revision: str | None = None) -> TrustedParts:
    """What a file of digests says. Raises `DigestFileError` if it cannot be used for this."""
    found = read_digest_file(path.expanduser())
    if found.model != model or revision not in (None, found.revision):
        wanted = f"{model}, revision {revision}" if revision else model
        raise DigestFileError(f"{path} is for {found.model}, revision {found.revision}, not for {wanted}")
    if not found.parts:
        raise DigestFileError(
            f"{path} has no digests by which weights can be taken from peers: make it with "
            "`swarm digest MODEL --for-peers > FILE`"
        )
    return TrustedParts(found.revision, len(found.digests), found.parts)


def pinned_path(model: str, revision: str | None) -> Path | None:
    """Where this machine keeps what was pinned at first use; None where there is no home."""
    folder = cache_folder()
    if folder is None:
        return None
    named = hashlib.sha256(f"{model}\0{revision or ''}".encode("utf-8", "replace")).hexdigest()[:32]
    return folder / "digests" / f"first-use-parts-{named}.json"


async def trusted_at_first_use(
    model: str, revision: str | None, open_stream: OpenStream, find_holders: FindHolders, path: Path | None
) -> TrustedParts:
    """What all peers that are met now say, and said before on this machine; it is pinned in a file.

    Args:
        path: see `pinned_path`; None to pin nothing.

    Raises:
        WeightsUnavailable: no peer shares the model.
        UnknownWeights: they disagree, so that some of them are wrong.
        DigestFileError: what was pinned cannot be read.
    """
    pinned = await asyncio.to_thread(_pinned, model, revision, path)
    found, reasons = await _ask_all(model, revision or "", open_stream, await find_holders())
    if pinned is None and not found:
        why = "; ".join(dict.fromkeys(reasons)) or "no peer of the swarm shares it"
        raise WeightsUnavailable(
            f"the weights of {model} cannot be had from peers: {why}. Start a server that shares its weights "
            "(--share-weights on), or use --weights-from hub or a folder"
        )
    agreed = agree(model, ([pinned] if pinned is not None else []) + found)
    if path is not None and (pinned is None or pinned.digests != agreed.digests):
        logger.warning(
            "First use: the weights of %s, revision %s, are pinned as %d peers have them, because nothing here says "
            "which are right",
            model,
            agreed.revision,
            len(found),
        )
        content = encode_digest_file(model, agreed.revision, [None] * agreed.blocks, agreed.digests)
        try:
            write_digest_file(path, content)
        except DigestFileError as error:
            logger.warning("What was pinned at first use is forgotten when this process ends: %s", error)
    return agreed


def _pinned(model: str, revision: str | None, path: Path | None) -> TrustedParts | None:
    return trusted_by_file(model, path, revision) if path is not None and path.exists() else None


def agree(model: str, said: Sequence[TrustedParts]) -> TrustedParts:
    """What several say together, of whom each may know some parts. Pure. Raises `UnknownWeights` if two differ."""
    first = said[0]
    digests: dict[str, str] = {}
    for one in said:
        differs = any(digests.get(part, digest) != digest for part, digest in one.digests.items())
        if differs or (one.revision, one.blocks) != (first.revision, first.blocks):
            raise UnknownWeights(
                f"peers disagree about the weights of {model}, so none is believed: ask who has them for a file of "
                "`swarm digest MODEL --for-peers > FILE`, and give it with --digests FILE"
            )
        digests.update(one.digests)
    return TrustedParts(first.revision, first.blocks, digests)


async def _ask_all(
    model: str, revision: str, open_stream: OpenStream, holders: Sequence[str]
) -> tuple[list[TrustedParts], list[str]]:
    """What peers say, and why others say nothing. All are asked at once: some may never answer."""

    async def ask(holder: str) -> TrustedParts | RemoteError:
        try:
            with closing(HolderStream(await open_stream(holder))) as stream:
                reply = await stream.find(model, revision)
        except RemoteError as error:
            return error
        digests = {part: digest.hex() for part, digest in reply.digests.items()}
        return TrustedParts(reply.revision, reply.blocks, digests)

    said = await asyncio.gather(*map(ask, list(dict.fromkeys(holders))[: 2 * MAX_HOLDERS]))
    found = [one for one in said if isinstance(one, TrustedParts)]
    return found, [str(one) for one in said if isinstance(one, RemoteError)]
