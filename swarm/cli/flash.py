"""`swarm flash`: weights on flash, written once so that a server can read them piece by piece."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.common import console
from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import InvalidOption, ModelNotFound, format_blocks

if TYPE_CHECKING:
    from swarm.models.flash.files.inventory import StoredKind, StoredModel

REVISION_CHARACTERS = 12
HEADINGS = ("MODEL", "REVISION", "DTYPE", "BLOCKS", "KIND", "SIZE", "LAST USED")

cache_dir_option = click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for files from the hub; packed weights lie in its subfolder swarm-flash.  [default: beside the cache "
    "of the hub]",
)


@click.group(name="flash")
def main() -> None:
    """Prepare weights for flash, and manage what was prepared. A server with --flash prepares its blocks by itself."""


@main.command()
@click.argument("model", required=False)
@click.option("--revision", help="Branch, tag or commit of a model on the hub.")
@click.option("--blocks", metavar="START:END", help="Blocks to prepare.  [default: all]")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="As the server's; auto is the checkpoint's own.",
)
@click.option("--flash-exact", is_flag=True, help="For servers with --flash-exact: no block will select neurons.")
@cache_dir_option
@console.errors_to_exit_codes
def prepare(
    model: str | None, revision: str | None, blocks: str | None, dtype: str, flash_exact: bool, cache_dir: Path | None
) -> None:
    """Write packed weights of MODEL, a local folder or a name on the hub. Blocks that are finished are kept."""
    console.configure_logging()
    from swarm.models.checkpoints.checkpoint import open_checkpoint
    from swarm.models.checkpoints.partial_loading import resolve_dtype
    from swarm.models.flash.files.block_files import flash_root
    from swarm.models.loading.flash_preparation import open_prepared, plan_for_flash

    checkpoint = open_checkpoint(model, revision=revision, cache_dir=cache_dir)
    span = Span(0, checkpoint.blocks) if blocks is None else _parse_blocks(blocks)
    root, kept_in = flash_root(cache_dir), resolve_dtype(dtype, checkpoint.config)
    planned = plan_for_flash(checkpoint, span, kept_in, root, flash_exact)
    if len(planned) < span.length:
        raise InvalidOption(f"some blocks of {span} have no weights that could be on flash")
    prepared = open_prepared(checkpoint, planned, kept_in, root, progress=True)
    for one in prepared:
        one.close()
    written = [one.block for one in prepared if one.new]
    done = f"Prepared blocks {format_blocks(written)}" if written else f"Blocks {span} were prepared already"
    click.echo(f"{done}: {checkpoint.name}, in {root}")


@main.command()
@cache_dir_option
@console.errors_to_exit_codes
def show(cache_dir: Path | None) -> None:
    """Print what was prepared: models, blocks, kinds of records, sizes."""
    from swarm.models.flash.files.block_files import flash_root
    from swarm.models.flash.files.inventory import stored_models

    root = flash_root(cache_dir)
    found = stored_models(root)
    if not found:
        click.echo(f"{root} holds no packed weights: write some with `swarm flash prepare MODEL`", err=True)
        return
    rows = [HEADINGS, *(_row(stored, part, time.time()) for stored in found for part in stored.kinds)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    click.echo(f"{format_bytes(sum(stored.size for stored in found))} in {root}", err=True)


@main.command()
@click.argument("model", required=False)
@click.option("--yes", is_flag=True, help="Do not ask.")
@cache_dir_option
@console.errors_to_exit_codes
def clean(model: str | None, yes: bool, cache_dir: Path | None) -> None:
    """Remove the packed weights of MODEL, in all revisions and dtypes, or those of all models.

    The checkpoints stay, so everything can be prepared again.
    """
    from swarm.models.flash.files.block_files import flash_root
    from swarm.models.flash.files.inventory import remove_stored, stored_models

    root = flash_root(cache_dir)
    found = [stored for stored in stored_models(root) if model in (None, stored.name, stored.folder.name)]
    if not found and model is not None:
        raise ModelNotFound(f"{root} holds no packed weights of {model}; `swarm flash show` lists what it holds")
    if not found:
        click.echo(f"{root} holds no packed weights", err=True)
        return
    size = format_bytes(sum(stored.size for stored in found))
    names = ", ".join(sorted({stored.name for stored in found}))
    if not yes:
        click.confirm(f"Remove {size} of packed weights ({names})?", abort=True, err=True)
    for stored in found:
        remove_stored(stored)
    click.echo(f"Removed {size} of packed weights ({names}).", err=True)


def _row(stored: StoredModel, part: StoredKind, now: float) -> tuple[str, ...]:
    return (
        stored.name,
        stored.revision if stored.revision.startswith("folder-") else stored.revision[:REVISION_CHARACTERS],
        stored.dtype,
        format_blocks(part.blocks) or "none finished",
        part.kind or "unknown",
        format_bytes(part.size),
        _age(now - stored.last_used) if stored.last_used is not None else "never",
    )


def _age(seconds: float) -> str:
    """How long ago, in the largest unit of which there are two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return "just now"


def _parse_blocks(blocks: str) -> Span:
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", blocks, re.ASCII)
    if match is None:
        raise InvalidOption(f"--blocks {blocks!r}: use START:END, such as 0:8")
    return Span(int(match[1]), int(match[2]))


if __name__ == "__main__":
    main(prog_name="python -m swarm.cli.flash")
