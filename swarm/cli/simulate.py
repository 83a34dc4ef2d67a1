"""`swarm simulate`: simulates a swarm of up to thousands of servers on a virtual clock."""

from __future__ import annotations

import time
from pathlib import Path

import click

from swarm.common import console
from swarm.errors import UsageError
from swarm.planning.simulation import result_plot, result_report
from swarm.planning.simulation.result_statistics import compute_statistics
from swarm.planning.simulation.runner import simulate
from swarm.planning.simulation.scenario import find_scenario, shipped_scenarios

FILE_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command(name="simulate")
@click.argument("scenario", required=False)
@click.option("--list", "list_shipped", is_flag=True, help="List the scenarios that come with swarm, then exit.")
@click.option("--plot", type=FILE_PATH, help="Write a chart of throughput, moves and gaps, as PNG.")
@click.option("--json", "json_file", type=FILE_PATH, help="Write statistics and samples as JSON.")
@click.option("--seed", type=click.IntRange(0, 2**63), help="Random seed.  [default: the scenario's]")
@console.errors_to_exit_codes
def main(scenario: str | None, list_shipped: bool, plot: Path | None, json_file: Path | None, seed: int | None) -> None:
    """Simulate a swarm: print its throughput relative to the optimum, the moves of its servers, and the gaps.

    SCENARIO is a .yaml file or the name of a scenario that comes with swarm (see --list). The simulated servers run
    the same placement code as real ones.
    """
    if list_shipped:
        known = shipped_scenarios()
        width = max(map(len, known))
        for name, one in known.items():
            click.echo(f"{name:{width}}  {one.description}")
        return
    if scenario is None:
        raise UsageError("nothing to simulate: give a .yaml file, or a name from swarm simulate --list")
    began = time.perf_counter()
    result = simulate(find_scenario(scenario), seed)
    seconds = time.perf_counter() - began
    found = compute_statistics(result)
    click.echo(result_report.format_result(result, found))
    click.echo(f"Simulated in {seconds:.1f} s")
    if json_file is not None:
        try:
            json_file.write_bytes(result_report.result_to_json(result, found))
        except OSError as error:
            raise UsageError(f"{json_file} cannot be written: {error.strerror}") from None
    if plot is not None:
        result_plot.plot_result(result, plot)


if __name__ == "__main__":
    main(prog_name="python -m swarm.cli.simulate")
