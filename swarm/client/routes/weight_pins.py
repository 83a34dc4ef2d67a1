"""The digests that a client's servers must have: known beforehand, or pinned at first use.

First use: the client has no source for the weights, and its user has agreed to believe the servers that it meets first.
The digest of a block is then pinned as soon as all servers of the revision that are announced agree about it, for this
client and for all that come later on this machine. Where they disagree, nothing is pinned: to go by the majority would
leave the choice to an attacker who starts more servers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from swarm.data_structures import ServerInfo, ServerState, WeightDigests
from swarm.errors import DigestFileError, UnknownWeights, format_blocks
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.digest_file import encode_digest_file, read_digest_file, write_digest_file
from swarm.models.checkpoints.known_digests import kept_path, known_digests

logger = logging.getLogger(__name__)


class WeightPins:
    """The digests that a model's blocks must have, as far as they are known.

    Args:
        known: what is known now.
        checkpoint: the model, if digests are pinned at first use; None if what is known is all that counts.
        path: keeps what is pinned; None to keep nothing.
    """

    def __init__(self, known: WeightDigests, checkpoint: Checkpoint | None = None, path: Path | None = None) -> None:
        self.known = known
        self._checkpoint = checkpoint
        self._path = path

    def learn(self, servers: Iterable[ServerInfo]) -> WeightDigests:
        """What is known, after these announcements: at first use they pin what is not. Writes a small file if so."""
        if self._checkpoint is None:
            return self.known
        pinned = first_use(self.known, servers, self._checkpoint.revision)
        new = sorted(pinned.by_block.keys() - self.known.by_block.keys())
        self.known = pinned
        if new:
            logger.warning(
                "First use: the weights of blocks %s of %s are pinned as the servers announce them, because nothing "
                "here says which are right (--trust-on-first-use)",
                format_blocks(new),
                self._checkpoint.name,
            )
            self._save()
        return pinned

    def _save(self) -> None:
        assert self._checkpoint is not None
        if self._path is None:
            return
        digests = [self.known.by_block.get(block) for block in range(self._checkpoint.blocks)]
        try:
            write_digest_file(self._path, encode_digest_file(self._checkpoint.name, self._checkpoint.revision, digests))
        except DigestFileError as error:
            logger.warning("What was pinned at first use is forgotten when this client ends: %s", error)


def first_use(known: WeightDigests, servers: Iterable[ServerInfo], revision: str) -> WeightDigests:
    """What is known, and the digests of other blocks about which all online servers of the revision agree. Pure."""
    announced: dict[int, set[str]] = {}
    for server in servers:
        if server.state is ServerState.ONLINE and server.revision == revision:
            for block, digest in enumerate(server.digests, server.span.start):
                announced.setdefault(block, set()).add(digest)
    agreed = {block: min(found) for block, found in announced.items() if len(found) == 1}
    return WeightDigests({**agreed, **known.by_block}, known.origin)


def make_pins(checkpoint: Checkpoint, file: str | Path | None, trust_on_first_use: bool) -> WeightPins:
    """The digests by which a client chooses servers of this model.

    Args:
        file: made by `swarm digest`; None for those of the model's own source.
        trust_on_first_use: whether to believe the servers that are met first, if there is no source.

    Raises:
        DigestFileError: the file cannot be used, or is for another model or revision.
        UnknownWeights: there is no source, and servers are not to be believed.
        CheckpointError: the checkpoint's files are broken.
    """
    try:
        return WeightPins(known_digests(checkpoint, file))
    except UnknownWeights as error:
        if not trust_on_first_use:
            raise
        logger.debug("%s", error)
    path = kept_path("first-use", checkpoint)
    origin = f"those pinned at first use in {path}; remove this file only if you know that the weights were changed"
    pinned: dict[int, str] = {}
    if path is not None and path.exists():
        found = read_digest_file(path)
        found.require_for(path, checkpoint.revision, checkpoint.blocks)
        pinned = found.by_block
    return WeightPins(WeightDigests(pinned, origin), checkpoint, path)
