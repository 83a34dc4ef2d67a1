"""`swarm simulate`: a swarm of up to thousands of servers on a virtual clock."""

from __future__ import annotations

import time
from pathlib import Path

import click

from swarm.common import console
from swarm.errors import UsageError
from swarm.planning.simulation import result_plot, result_report
from swarm.planning.simulation.result_statistics import figures
from swarm.planning.simulation.runner import simulate
from swarm.planning.simulation.scenario import find, shipped

OUTPUT = click.Path(dir_okay=False, path_type=Path)


@click.command(name="simulate")
@click.argument("scenario", required=False)
@click.option("--list", "list_shipped", is_flag=True, help="List the scenarios that come with swarm, and end.")
@click.option("--plot", type=OUTPUT, help="Draw throughput, moves and gaps as PNG.")
@click.option("--json", "json_file", type=OUTPUT, help="Write figures and samples as JSON.")
@click.option("--seed", type=click.IntRange(0, 2**63), help="Seed of all that is random.  [default: the scenario's]")
@console.exit_codes
def main(scenario: str | None, list_shipped: bool, plot: Path | None, json_file: Path | None, seed: int | None) -> None:
    """Simulate a swarm: print its throughput against the optimum, the moves that servers made, and the gaps.

    SCENARIO is a .yaml file or the name of one that comes with swarm (see --list). The servers decide with the very
    functions that real ones use.
    """
    if list_shipped:
        known = shipped()
        width = max(map(len, known))
        for name, one in known.items():
            click.echo(f"{name:{width}}  {one.description}")
        return
    if scenario is None:
        raise UsageError("say what to simulate: a .yaml file, or a name that swarm simulate --list shows")
    began = time.perf_counter()
    outcome = simulate(find(scenario), seed)
    seconds = time.perf_counter() - began
    found = figures(outcome)
    click.echo(result_report.text(outcome, found))
    click.echo(f"Simulated in {seconds:.1f} s")
    if json_file is not None:
        try:
            json_file.write_bytes(result_report.to_json(outcome, found))
        except OSError as error:
            raise UsageError(f"{json_file} cannot be written: {error.strerror}") from None
    if plot is not None:
        result_plot.draw(outcome, plot)


if __name__ == "__main__":
    main(prog_name="python -m swarm.cli.simulate")
