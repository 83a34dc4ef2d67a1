"""Weights on flash against the figures of "LLM in a flash", and experts on flash against mmap.

    python -m benchmarks.flash [--folder DIR] [--only io,decode,memory,matrix,experts] [--short]
        [--dtypes bfloat16,float32] [--blocks 4] [--expert-blocks 8] [--tokens 3000]
        [--active 0.033 --selected 0.1 --window 5 --resident 0.24 --newly 0.024 --name NAME]
        [--no-squeeze] [--pictures DIR]

io       table 2: what a token reads, and how fast, as one method is added to another
decode   table 3: seconds a token at half the memory, end to end, against naive, hybrid, and everything in memory
memory   resident memory over an hour's worth of tokens
matrix   what an update of the swap-delete matrix costs, by the rows that are there
experts  a mixture of experts with a quarter in memory, against mmap under a ballast of locked memory

True shapes, random weights: there is no trained model of this size to be had. Which neurons a token needs is planted
(`planted`), with the paper's sparsity and, in tables of their own, with that of a trained small model; other
numbers can be given. Everything takes turns within one run, with one torch thread, and ratios are of the same round;
other programs on the machine affect both sides.

Files go to a temporary folder (`--folder` for its parent): up to 8 GB for fp32, 10 GB for experts, one after the other.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import Better, Report, report_parser
from benchmarks.flash import decode, io, matrix, memory, pictures
from benchmarks.flash.experts import against_mmap
from benchmarks.flash.planted import PAPER, TRAINED, Measured, PlantedNeurons
from benchmarks.flash.setting import Setting, half_the_memory

PARTS = ("io", "decode", "memory", "matrix", "experts")


class Run:
    """One run of the benchmark.

    Attributes:
        results: for the pictures.
    """

    def __init__(self, report: Report, arguments: argparse.Namespace, folder: Path) -> None:
        self._report = report
        self._arguments, self._folder = arguments, folder
        self._rounds = 2 if arguments.short else arguments.repeats
        self._rows = [PAPER, *TRAINED] if arguments.name is None else [_given(arguments)]
        self.results: dict[str, Any] = {}

    def io(self) -> None:
        for dtype in self._dtypes():
            for like in self._rows:
                layers = min(self._arguments.blocks, 2)
                rows = io.run(self._folder, dtype, layers, like, self._rounds)
                self._say(f"Reading for a token, {_name(dtype)}, {like.name}", io.report(rows))
                self._keep(f"io, {_name(dtype)}, {like.name}", {row.name: row.seconds for row in rows})
            self._clear()

    def decode(self) -> None:
        for dtype in self._dtypes():
            for like in self._rows:
                planted, layers = PlantedNeurons.like(like), self._arguments.blocks
                half = half_the_memory(dtype, layers)
                setting = Setting(self._folder, dtype, layers, planted, half)
                variants = decode.variants(setting)
                decode.measure(variants, setting, self._rounds)
                self._say(f"A token end to end, {_name(dtype)}, {like.name}", decode.report(variants))
                seconds = {one.name: one.seconds for one in variants}
                self._keep(f"decode, {_name(dtype)}, {like.name}", seconds)
                self.results[f"decode {_name(dtype)} {like.name}"] = seconds
                del variants
            self._clear()

    def memory(self) -> None:
        tokens = 300 if self._arguments.short else self._arguments.tokens
        found = memory.measure(self._folder, torch.bfloat16, min(self._arguments.blocks, 2), tokens)
        self._say("Resident memory", memory.report(found))
        self.results["memory"] = asdict(found)
        self._clear()

    def matrix(self) -> None:
        for dtype in self._dtypes():
            rows = matrix.measure(dtype, max(self._rounds, 5))
            self._say(f"Updates of {matrix.CHANGES} neurons, {_name(dtype)}", matrix.report(rows))

    def experts(self) -> None:
        blocks, squeeze = self._arguments.expert_blocks, not self._arguments.no_squeeze
        found = against_mmap.measure(self._folder, blocks, self._rounds, squeeze)
        self._say("A mixture of experts", against_mmap.report(found))
        self._keep("experts, tokens/s", {"flash": found.flash.rates, "mmap": found.mapped.rates}, "more")
        del found
        self._clear()

    def _dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in self._arguments.dtypes.split(",")]

    def _clear(self) -> None:
        for path in self._folder.glob("*.bin"):
            path.unlink()

    def _say(self, title: str, text: str) -> None:
        self._report.note(f"{title}; median (range) of {self._rounds} rounds\n\n{text}\n")

    def _keep(self, where: str, found: dict[str, list[float]], better: Better = "less") -> None:
        """Seconds a token, if nothing else is said."""
        for name, values in found.items():
            for value in values:
                self._report.add(name, value, better, where=where)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _given(arguments: argparse.Namespace) -> Measured:
    return Measured(
        arguments.name,
        arguments.active,
        arguments.selected,
        arguments.window,
        arguments.resident,
        arguments.newly,
    )


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="on the drive to be measured")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--short", action="store_true", help="two rounds and few tokens")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--blocks", type=int, default=4, help="of OPT-6.7B on the drive; a multiple of four")
    parser.add_argument("--expert-blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3000, help="over which resident memory is measured")
    parser.add_argument("--name", help="of measured sparsity that is given by the next options")
    for name in ("active", "selected", "resident", "newly"):
        parser.add_argument(f"--{name}", type=float, default=getattr(PAPER, name))
    parser.add_argument("--window", type=int, default=PAPER.window)
    parser.add_argument("--no-squeeze", action="store_true", help="without a ballast")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the results")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--only takes some of {', '.join(PARTS)}")
    torch.set_num_threads(1)
    with (
        Report(arguments) as report,
        tempfile.TemporaryDirectory(dir=arguments.folder, prefix="flash-benchmark-") as folder,
    ):
        run = Run(report, arguments, Path(folder))
        for part in parts:
            getattr(run, part)()
    if arguments.pictures is not None:
        pictures.draw(run.results, arguments.pictures)


if __name__ == "__main__":
    main()
