"""`swarm digest`: writes down which weights a model's servers must have."""

from __future__ import annotations

from pathlib import Path

import click

from swarm.common import console


@click.command(name="digest")
@click.argument("model", required=False)
@click.option("--revision", help="Branch, tag or commit of a model from the hub.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: standard output]",
)
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder for files from the hub.")
@console.errors_to_exit_codes
def main(model: str | None, revision: str | None, output: Path | None, cache_dir: Path | None) -> None:
    """Print a digest of each block's weights of MODEL: a local folder or a hub id, by default the demo model.

    A client that has the model's weights needs no such file. Give it to those who only have the config, the tokenizer
    and the embeddings: as --digests FILE, or as swarm-digests.json beside the checkpoint's other files.
    """
    from swarm.models.checkpoints.checkpoint import open_checkpoint
    from swarm.models.checkpoints.digest_file import encode_digest_file, write_digest_file
    from swarm.models.checkpoints.known_digests import known_digests

    checkpoint = open_checkpoint(model, revision=revision, cache_dir=cache_dir)
    known = known_digests(checkpoint)
    digests = [known.by_block.get(block) for block in range(checkpoint.blocks)]
    content = encode_digest_file(checkpoint.name, checkpoint.revision, digests)
    if output is None:
        click.echo(content.decode(), nl=False)
        return
    write_digest_file(output, content)
    click.echo(f"Wrote the digests of {checkpoint.blocks} blocks of {checkpoint.name} to {output}.", err=True)


if __name__ == "__main__":
    main(prog_name="python -m swarm.cli.digest")
