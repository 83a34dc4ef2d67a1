"""`swarm receipt`: checks what servers have signed, without a network."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from swarm.common import console


@click.group(name="receipt")
def main() -> None:
    """Check receipts: what servers say that they have computed, signed by them."""


@main.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@console.errors_to_exit_codes
def verify(file: Path) -> None:
    """Check the signatures of the receipts in FILE, and that each server was given what the one before it gave.

    The exit code is 1 if something is wrong with them.
    """
    from swarm.trust.receipts import Statement, read_receipts, report_on

    report = report_on(read_receipts(file))

    def describe(one: Statement) -> str:
        blocks, when = one.blocks, datetime.fromtimestamp(min(one.signed_at, 2**35), UTC)
        sparse = ", some neurons only" if blocks.sparse else ""
        return (
            f"blocks {one.span}  {one.tokens} tokens in {one.steps} steps"
            f"{f' and {one.replayed_tokens} replayed' if one.replayed_tokens else ''}, "
            f"{blocks.dtype}, weights {blocks.quantization} {blocks.weights.hex()[:12]}{sparse}\n"
            f"  signed by {one.server} on {when:%Y-%m-%d %H:%M} UTC\n"
            f"  for {one.client}, session {one.session_id.hex()}"
        )

    for statement in report.statements:
        console.print_line(describe(statement))
    for note in report.notes:
        console.print_line(f"Note: {note}")
    for problem in report.problems:
        console.print_line(f"WRONG: {problem}")
    if not report.statements and not report.problems:
        console.print_line("The file has no receipts.")
    if report.problems or not report.statements:
        sys.exit(1)
    compared = "" if report.notes or len(report.statements) < 2 else ", and each was given what the one before it gave"
    console.print_line(f"{len(report.statements)} signatures are right{compared}.")
