"""`swarm digest`: writes down which weights a model's servers must have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from swarm.common import console

if TYPE_CHECKING:
    from swarm.models.checkpoints.checkpoint import Checkpoint


@click.command(name="digest")
@click.argument("model", required=False)
@click.option("--revision", help="Branch, tag or commit of a model from the hub.")
@click.option(
    "--for-peers",
    is_flag=True,
    help="Also the digests by which servers and clients take weights from other peers. Reads all weights.",
)
@console.errors_to_exit_codes
def main(model: str | None, revision: str | None, for_peers: bool) -> None:
    """Print a digest of each block's weights of MODEL: a local folder, a GGUF file or a hub id, by default the demo.

    A client that has the model's weights needs no such file. Give it to those who only have the config, the tokenizer
    and the embeddings: as --digests FILE, or as swarm-digests.json beside the checkpoint's other files.
    """
    from swarm.errors import CheckpointError
    from swarm.models.checkpoints.checkpoint import open_checkpoint
    from swarm.models.checkpoints.known_digests import encode_digest_file, known_digests

    checkpoint = open_checkpoint(model, revision=revision)
    known = known_digests(checkpoint)
    if known is None:
        raise CheckpointError(f"{checkpoint.name} is not on this machine: download the whole model")
    digests = [known.by_block.get(block) for block in range(checkpoint.blocks)]
    parts = _part_digests(checkpoint) if for_peers else None
    content = encode_digest_file(checkpoint.name, checkpoint.revision, digests, parts)
    click.echo(content.decode(), nl=False)


def _part_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """The digests of all parts, of whose weights each byte is read. Raises `CheckpointError` if some are not here."""
    from swarm.errors import CheckpointError
    from swarm.shared_weights.checkpoint_parts import CheckpointParts
    from swarm.shared_weights.manifest import all_parts

    parts = CheckpointParts.of(checkpoint)
    missing = [part for part in all_parts(checkpoint.blocks) if part not in parts.held]
    if missing:
        raise CheckpointError(
            f"part {missing[0]} of {checkpoint.name} is not on this machine, so it cannot be read: download the whole "
            "model, or leave --for-peers out"
        )
    with console.progress_bar("Reading", parts.size_bytes(parts.held), "B") as bar:
        return parts.manifests(on_hashed=bar.update).digests
