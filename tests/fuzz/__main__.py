"""`python -m tests.fuzz`: attack a swarm with hostile messages of all kinds, and watch what must hold."""

from __future__ import annotations

import sys

import click

from tests.fuzz.campaign import Plan
from tests.fuzz.run import run


@click.command()
@click.option("--messages", default=100_000, show_default=True, help="How many to send, of all kinds together.")
@click.option("--minutes", default=10.0, show_default=True, help="The time for that.")
@click.option("--seed", default=1, show_default=True, help="Everything that is sent follows from it.")
@click.option("--only", multiple=True, metavar="KIND", help="Send this kind only. May be repeated.")
@click.option("--replay", metavar="KIND:SEED:BATCH", help="Send one batch again, as a violation names it.")
def main(messages: int, minutes: float, seed: int, only: tuple[str, ...], replay: str | None) -> None:
    """Attack a swarm of real processes, which is started for that. Exits with 1 if anything was violated."""
    batch = None
    if replay is not None:
        kind, number, text = replay.split(":")
        only, seed, batch = (kind,), int(number), int(text)
    report = run(Plan(messages, minutes * 60, seed, batch), only)
    print(report.text, flush=True)
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
