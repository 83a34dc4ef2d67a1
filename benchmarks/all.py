"""Runs the benchmarks, one after the other, and keeps their figures.

    python -m benchmarks.all [--only decoding network.push ...] [--json [FOLDER]]

With `--json`, the figures of all go to one file, named after the time and the commit, in `artifacts/benchmarks` or
another folder. `scripts/compare_benchmarks.py` compares two of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BENCHMARKS = (
    "decoding.chain --patience 40",
    "decoding.chain --shape small --servers 1 3 --tokens 32 --patience 40",
    "decoding.chain --shape hybrid --servers 3 --tokens 32 --patience 30",
    "serving.clients",
    "serving.start",
    "decoding.lanes --tokens 20 --repeats 3 --patience 20",
    "decoding.prefill --servers 3 --chunks auto",
    "network.wire --patience 2",
    "decoding.quantization --batches 1,8 --repeats 3 --patience 10",
    "network.push --tokens 10 --repeats 3 --patience 10",
    "network.failover --patience 30",
    "network.routing --servers 3000 --patience 5",
    "weights --quick --only rate resume",
    "training --only near --repeats 3 --patience 30",
    "serving.gateway --seconds 8 --tokens 32 --patience 10",
    "serving.gateway --kill --tokens 32",
    "decoding.heads --patience 20",
    "decoding.parts --patience 20",
    "flash --short --only io,matrix",
)
"""What fits into half an hour on two shared cores. Each measures more if it is asked to."""

FOLDER = Path("artifacts/benchmarks")


def run(command: str, file: Path) -> int:
    """Run one benchmark, which prints its tables and writes its figures to a file; its exit code."""
    print(f"\n## python -m benchmarks.{command}\n", flush=True)
    began = time.monotonic()
    arguments = [sys.executable, "-m", *shlex.split(f"benchmarks.{command}"), "--json", str(file)]
    code = subprocess.run(arguments, check=False).returncode
    print(f"{time.monotonic() - began:.0f} s" + (f", FAILED with code {code}" if code else ""), flush=True)
    return code


def commit() -> str:
    """The commit that is checked out, and a plus if files differ from it; `unknown` outside of a repository."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False
    ).stdout
    return found.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="those whose names begin like this")
    parser.add_argument("--json", nargs="?", type=Path, const=FOLDER, metavar="FOLDER", help=f"keep figures ({FOLDER})")
    arguments = parser.parse_args()
    chosen = [one for one in BENCHMARKS if one.startswith(tuple(arguments.only))]
    reports, failed = [], []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, command in enumerate(chosen):
            file = Path(folder) / f"{number}.json"
            if run(command, file):
                failed.append(command)
            if file.exists():
                reports.append(json.loads(file.read_text()))
    minutes = (time.monotonic() - began) / 60
    print(f"\n{len(chosen)} benchmarks in {minutes:.0f} min; failed: {', '.join(failed) or 'none'}")
    if arguments.json:
        arguments.json.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC)
        file = arguments.json / f"{now:%Y-%m-%dT%H%M%SZ}-{commit()}.json"
        file.write_text(json.dumps({"commit": commit(), "when": now.isoformat(), "reports": reports}, indent=1) + "\n")
        print(f"figures: {file}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
