"""Simulates swarms of up to 10,000 servers and prints throughput relative to the optimum, moves and outages.

python -m benchmarks.simulation                        all scenarios, seed 0: what docs/simulation.md shows
python -m benchmarks.simulation liar --seeds 0 1 2 3
"""

from __future__ import annotations

import argparse
import time

from benchmarks.simulation.result import compute_statistics, format_result, simulate
from benchmarks.simulation.scenario import SCENARIOS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    if unknown := [name for name in options.scenarios if name not in SCENARIOS]:
        parser.error(f"no scenario {unknown[0]!r}: choose among {', '.join(SCENARIOS)}")
    for name in options.scenarios or SCENARIOS:
        for seed in options.seeds:
            began = time.perf_counter()
            result = simulate(SCENARIOS[name], seed)
            print(f"{name}: {format_result(result, compute_statistics(result))}")
            print(f"Simulated in {time.perf_counter() - began:.1f} s\n", flush=True)


if __name__ == "__main__":
    main()
