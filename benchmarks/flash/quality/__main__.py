"""Quality of models of which a token is computed with few neurons: perplexity, recall and the share that is selected.

    python -m benchmarks.flash.quality runs/opt runs/nemotron --text texts/*.txt [--json F] [--picture F] [--quick]
    python -m benchmarks.flash.quality runs/opt runs/nemotron --text texts/*.txt --reads [--quick]

The models are those that `scripts/train_demo_model.py --family ...` trains (ReLU, squared ReLU, gated ReLU), or others
with exact zeros. The last 2 % of each text, which they have not seen, is what is measured on. Every block is sparse and
every token is computed with its predicted neurons. At a server prompts are exact, so this is the worst case. Methods:

    oracle       the neurons that contribute most, told from the true activations: the bound for any predictor
    gate         the activation itself as predictor (the paper's gate-as-predictor): what is active, and nothing else
    svd R        untrained: the singular vectors of the weights, rank R
    inputs svd R untrained: the same for the products with inputs as they occur
    trained R    with the balanced loss, beginning with the latter
    default      what preparation makes: a rank for each layer, the better of the last two

With `--reads` it prints instead what is read for a token, by the rule that decides which neurons stay in memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks.common import machine
from benchmarks.common.tables import table
from benchmarks.flash.quality.methods import RANKS, RECALLS, Result, Subject, measure
from benchmarks.flash.quality.reads import reads_table

WINDOWS, QUICK_WINDOWS = 32, 8
LIMIT = 0.5
"""Per cent by which perplexity may rise at the default settings."""


def results_table(results: Sequence[Result]) -> str:
    rows = [
        [
            one.method,
            f"{one.target:.3f}".rstrip("0"),
            f"{100 * (one.ratio - 1):+.2f} %",
            f"{one.mean('selected'):.1%}",
            f"{one.mean('recall'):.1%}",
            f"{one.mean('energy'):.2%}",
            f"{one.memory_share:.1%}",
        ]
        for one in results
    ]
    heading = ["method", "target", "perplexity", "selected", "recall", "squared contributions", "predictor / layer"]
    return table(heading, rows)


def layers_table(result: Result) -> str:
    """Of one method, layer by layer."""
    rows = [
        [
            str(number),
            f"{one.active:.1%}",
            f"{one.selected:.1%}",
            f"{one.recall:.1%}",
            f"{one.missed:.2%}",
            f"{one.energy:.2%}",
        ]
        for number, one in enumerate(result.layers)
    ]
    return table(["layer", "active", "selected", "recall", "false negatives", "squared contributions"], rows)


def sharing_table(result: Result) -> str:
    """What tokens need together: of one sequence one after the other, and of several sequences at once."""
    return table(["tokens", "selected together"], [[name, f"{share:.1%}"] for name, share in result.together.items()])


def picture(results: dict[str, list[Result]], path: Path) -> None:
    """Selected share against perplexity, a panel for each model and a line for each method."""
    figure = Figure(figsize=(5.5 * len(results), 4.2), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, found) in zip(panels, results.items(), strict=True):
        for method in dict.fromkeys(one.method for one in found):
            points = [(one.mean("selected"), 100 * (one.ratio - 1)) for one in found if one.method == method]
            shares, losses = zip(*points, strict=True)
            axes.plot(shares, losses, marker="o" if len(points) > 1 else "*", markersize=4, label=method)
        axes.axhline(LIMIT, color="gray", linestyle=":", linewidth=1)
        axes.set(xlabel="share of neurons selected for a token", ylabel="perplexity, % above exact", title=name)
        axes.set_yscale("symlog", linthresh=LIMIT)
        axes.grid(alpha=0.3)
    panels[-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def report(subject: Subject, results: list[Result]) -> str:
    shipped = next(one for one in results if one.method == "default")
    return "\n\n".join(
        [
            f"## {subject.name}",
            f"Exact perplexity {subject.exact:.2f} over {subject.held_out[:, 1:].numel()} tokens.",
            results_table(results),
            "The default, layer by layer:",
            layers_table(shipped),
            sharing_table(shipped),
        ]
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="folders")
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="the files that they were trained on")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--recalls", type=float, nargs="+", default=RECALLS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--quick", action="store_true", help="a quarter of the text")
    parser.add_argument("--reads", action="store_true", help="what is read for a token, and nothing else")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    results: dict[str, list[Result]] = {}
    for folder in options.models:
        subject = Subject(folder, options.text, QUICK_WINDOWS if options.quick else WINDOWS)
        if options.reads:
            print(f"\n## {subject.name}\n\n{reads_table(subject)}\n", flush=True)
            continue
        results[subject.name] = measure(subject, options.ranks, options.recalls)
        print(f"\n{report(subject, results[subject.name])}\n", flush=True)
    if options.json:
        found = {name: [asdict(one) for one in some] for name, some in results.items()}
        options.json.write_text(json.dumps({"machine": machine.describe(), "results": found}, indent=1))
    if options.picture:
        picture(results, options.picture)


if __name__ == "__main__":
    main()
