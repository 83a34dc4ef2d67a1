"""Which digests the blocks of a model must have, and the JSON files that say so.

    {"format": 2, "model": "org/model", "revision": "5c38…", "digests": ["0123456789ab", …], "parts": {"0": "9f86…", …}}

`digests` has null for a block whose weights are not known. `parts` has the digests by which weights are taken from
other peers (`swarm.shared_weights`); it may be missing, and is in files of format 1.

A client takes digests from a file that its user names, from the weights if they are on its machine, or from a file
beside the checkpoint, made by the checkpoint's author. No server has a say in that. Without any of these, the revision
identifies the weights if it is a commit of the hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError

from swarm.common.files.atomic_file import read_small, replace_file
from swarm.common.files.checked_json import fields, integer, items, mapping, parse_json, text, to_json
from swarm.data_structures import WeightDigests
from swarm.errors import DigestFileError, HubUnreachable, UnknownWeights
from swarm.models.checkpoints.block_digest import DIGEST_HEX_DIGITS
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.config_limits import MAX_BLOCKS

FORMAT_VERSION = 2
MAX_FILE_BYTES = 1 << 20
MAX_NAME_CHARACTERS = 4096
FILE_BESIDE_CHECKPOINT = "swarm-digests.json"


def known_digests(checkpoint: Checkpoint, file: str | Path | None = None) -> WeightDigests | None:
    """The digests that blocks of a model must have; None if only the revision identifies the weights.

    Args:
        file: made by `swarm digest`; None for those of the model's own source.

    Raises:
        DigestFileError: the file cannot be used, or is for another model or revision.
        UnknownWeights: neither digests nor the revision identify the weights.
        CheckpointError: the checkpoint's files are broken.
    """
    if file is not None:
        path = Path(file).expanduser()
        found = read_digest_file(path)
        found.require_for(path, checkpoint.revision, checkpoint.blocks)
        return WeightDigests(found.by_block, f"those in {file}")
    local = checkpoint.block_digests(0, checkpoint.blocks)
    if local is not None:
        return WeightDigests(dict(enumerate(local)), f"those in {checkpoint.source}")
    beside = _beside(checkpoint)
    if beside is None and checkpoint.parts is None and Path(checkpoint.source).exists():
        raise UnknownWeights(
            f"nothing says which weights servers of {checkpoint.name} must have: {checkpoint.source} does not hold the "
            "weights of all blocks. Ask who has them for a file of `swarm digest MODEL > FILE` and give it: "
            "--digests FILE, in Python NetworkOptions(digests=FILE)"
        )
    return beside


def _beside(checkpoint: Checkpoint) -> WeightDigests | None:
    """The digests in the file beside the checkpoint; None if there is no such file. Raises `DigestFileError`."""
    try:
        path = checkpoint.fetch(FILE_BESIDE_CHECKPOINT)
    except (EntryNotFoundError, HubUnreachable):
        return None
    found = read_digest_file(path)
    # Its revision may be that of the folder before the upload, and the file cannot name the commit that adds it.
    found.require_for(path, found.revision, checkpoint.blocks)
    return WeightDigests(found.by_block, f"those in {FILE_BESIDE_CHECKPOINT} of {checkpoint.source}")


@dataclass(frozen=True)
class DigestFile:
    """The digests of a model's blocks.

    Attributes:
        model: its name.
        revision: see `Checkpoint`.
        digests: one for each block of the model, None where it is not known.
        parts: the digests of whole parts, by the part's name; empty if the file has none.
    """

    model: str
    revision: str
    digests: tuple[str | None, ...]
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def by_block(self) -> dict[int, str]:
        """The digests that are known."""
        return {block: one for block, one in enumerate(self.digests) if one is not None}

    def require_for(self, path: Path, revision: str, blocks: int) -> None:
        """Raise `DigestFileError` unless the file is for this revision of a model of so many blocks."""
        if self.revision != revision or len(self.digests) != blocks:
            raise DigestFileError(
                f"{path} has digests of {len(self.digests)} blocks of {self.model}, revision {self.revision}; this "
                f"model has {blocks} blocks and revision {revision}. Use that revision, or make the file again from a "
                "checkpoint that you trust: swarm digest MODEL > FILE"
            )


def read_digest_file(path: Path) -> DigestFile:
    """Read a file of digests. Raises `DigestFileError` if it cannot be used."""
    try:
        return _parse(parse_json(read_small(path, MAX_FILE_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise DigestFileError(
            f"{path} is not a usable file of digests: {why}. `swarm digest MODEL > FILE` makes one"
        ) from None


def _parse(value: object) -> DigestFile:
    version, model, revision, digests, parts = fields(value, ("format", "model", "revision", "digests"), ("parts",))
    integer(version, 1, FORMAT_VERSION)
    pattern = f"[0-9a-f]{{{DIGEST_HEX_DIGITS}}}"
    found = [None if one is None else text(one, DIGEST_HEX_DIGITS, pattern) for one in items(digests, MAX_BLOCKS)]
    parts = {} if parts is None else parts
    named = {text(name, 16, "[a-z0-9]+"): text(one, 64, "[0-9a-f]{64}") for name, one in mapping(parts).items()}
    return DigestFile(text(model, MAX_NAME_CHARACTERS), text(revision, MAX_NAME_CHARACTERS), tuple(found), named)


def encode_digest_file(
    model: str, revision: str, digests: Sequence[str | None], parts: Mapping[str, str] | None = None
) -> bytes:
    """The content of a file of digests."""
    value = {"format": FORMAT_VERSION, "model": model, "revision": revision, "digests": list(digests)}
    if parts:
        value["parts"] = dict(parts)
    return to_json(value, indent=1) + b"\n"


def write_digest_file(path: Path, content: bytes) -> None:
    """Write a file of digests, as a whole or not at all. Raises `DigestFileError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise DigestFileError(f"{path} cannot be written: {error.strerror}") from None
