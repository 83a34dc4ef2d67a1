"""Which digests the blocks of a model must have, from where its weights come. No server has a say in that.

In this order: a file that the user names; the weights themselves, as far as they are on this machine; for a hub model,
what was read of this commit before, for which the hub need not be there; a file beside the checkpoint
(`swarm-digests.json`), from the checkpoint's author; for a hub model, ranges of the files of its commit, which are read
once and kept. If there is none of them, the user may agree to believe the servers that the client meets first
(`swarm.client.routes.weight_pins`).
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError

from swarm.common.files.folders import cache_folder
from swarm.data_structures import WeightDigests
from swarm.errors import CheckpointError, DigestFileError, ModelNotFound, UnknownWeights
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.digest_file import encode_digest_file, read_digest_file, write_digest_file
from swarm.models.checkpoints.hub_digests import HubFiles, hub_block_digests

logger = logging.getLogger(__name__)

FILE_BESIDE_CHECKPOINT = "swarm-digests.json"


def known_digests(checkpoint: Checkpoint, file: str | Path | None = None) -> WeightDigests:
    """The digests that all blocks of a model must have.

    Args:
        file: made by `swarm digest`; None for those of the model's own source.

    Raises:
        DigestFileError: the file cannot be used, or is for another model or revision.
        UnknownWeights: no source of the weights can be read.
        CheckpointError: the checkpoint's files are broken.
    """
    if file is not None:
        return _from_file(checkpoint, Path(file).expanduser(), f"those in {file}")
    local = checkpoint.block_digests(0, checkpoint.blocks)
    if local is not None:
        return WeightDigests(dict(enumerate(local)), f"those in {checkpoint.source}")
    if Path(checkpoint.source).is_dir():
        beside = _beside(checkpoint)
        if beside is None:
            raise UnknownWeights(_unknown(checkpoint, f"{checkpoint.source} does not hold the weights of all blocks"))
        return beside
    return _kept(checkpoint) or _from_hub(checkpoint)


def _from_file(checkpoint: Checkpoint, path: Path, origin: str) -> WeightDigests:
    found = read_digest_file(path)
    found.require_for(path, checkpoint.revision, checkpoint.blocks)
    return WeightDigests(found.by_block, origin)


def _beside(checkpoint: Checkpoint) -> WeightDigests | None:
    """The digests in the file beside the checkpoint; None if it has no such file. Raises `DigestFileError`."""
    try:
        path = checkpoint.fetch(FILE_BESIDE_CHECKPOINT)
    except EntryNotFoundError:
        return None
    found = read_digest_file(path)
    # Its revision may be that of the folder before the upload, and the file cannot name the commit that adds it.
    found.require_for(path, found.revision, checkpoint.blocks)
    return WeightDigests(found.by_block, f"those in {FILE_BESIDE_CHECKPOINT} of {checkpoint.source}")


def _kept(checkpoint: Checkpoint) -> WeightDigests | None:
    """What was read from the hub before; None if that was never done, or cannot be used."""
    path = kept_path("hub", checkpoint)
    if path is None or not path.exists():
        return None
    try:
        return _from_file(checkpoint, path, _hub_origin(checkpoint))
    except DigestFileError as error:
        logger.warning("%s; the digests are read again", error)
        return None


def _from_hub(checkpoint: Checkpoint) -> WeightDigests:
    blocks: list[dict[str, str]] = [{} for _ in range(checkpoint.blocks)]
    try:
        beside = _beside(checkpoint)
        if beside is not None:
            return beside
        logger.info("Reading the digests of %d blocks of %s from the model hub", checkpoint.blocks, checkpoint.source)
        for name in checkpoint.weight_map:
            place = checkpoint.locate(name)
            if place is not None:
                blocks[place[0]][name] = place[1]
        files = HubFiles(checkpoint.source, checkpoint.revision)
        digests = hub_block_digests(files, checkpoint.weight_map, blocks)
    except (CheckpointError, ModelNotFound) as error:  # the latter, where the hub cannot be reached
        raise UnknownWeights(_unknown(checkpoint, str(error))) from error
    path = kept_path("hub", checkpoint)
    if path is not None:
        try:
            write_digest_file(path, encode_digest_file(checkpoint.name, checkpoint.revision, digests))
        except DigestFileError as error:
            logger.debug("%s", error)
    return WeightDigests(dict(enumerate(digests)), _hub_origin(checkpoint))


def _hub_origin(checkpoint: Checkpoint) -> str:
    return f"those of {checkpoint.source} on the model hub"


def kept_path(kind: str, checkpoint: Checkpoint) -> Path | None:
    """Where this machine keeps digests of a model's revision; None where there is no home."""
    folder = cache_folder()
    if folder is None:
        return None
    named = hashlib.sha256(f"{checkpoint.name}\0{checkpoint.revision}".encode("utf-8", "replace")).hexdigest()[:32]
    return folder / "digests" / f"{kind}-{named}.json"


def _unknown(checkpoint: Checkpoint, why: str) -> str:
    return (
        f"nothing says which weights servers of {checkpoint.name} must have: {why}. Ask who has them for a file of "
        "`swarm digest MODEL --output FILE` and give it (--digests FILE), or believe the servers that are met first "
        "(--trust-on-first-use). In Python: NetworkOptions(digests=FILE) or NetworkOptions(trust_on_first_use=True)"
    )
