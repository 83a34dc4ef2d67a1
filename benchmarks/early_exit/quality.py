"""What early exit costs and saves: the table of "An Efficient Inference Framework for Early-exit LLMs" for our decoder.

    python -m benchmarks.early_exit.quality --text texts/*.txt [--exits 3,6,9] [--windows 16] [--tokens 128]
        [--picture FILE] [--json FILE]

The demo model, its lenses and classifiers (trained here on the texts' beginnings), and the ends of the texts, which
neither the model nor the lenses have seen. Each token of a text may leave in front of one of a few blocks, by one of
three confidences, with thresholds from strict to loose. Counted are the blocks that tokens skip, how often the token
that is chosen is the full model's, and what the perplexity loses.

Caches behind an exit are exact (what later servers compute; the text's own hidden states then do not depend on who has
left) or projected (`fill="project"`: computed token by token, as a server does). Batches of 4 and 16 leave by row, or
when all of their sequences are sure. The paper's models are encoder-decoder models; those are not ours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import machine
from benchmarks.common.tables import table
from benchmarks.early_exit.leaving import AtExit, Quality, leave, measured, quality
from scripts.calibrate_wire import read_texts
from scripts.exit_loss import read_hidden, states_behind
from swarm.client.model.train_exits import KEPT_TOKENS, LensFit, fit_classifier
from swarm.data_structures import ExitBatchRule, ExitConfidence, ExitThresholds, Span, StepLayout
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER, open_checkpoint
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.models.execution.strategy_choice import choose_exit_forwards, choose_forward
from swarm.models.exits.confidence import softmax_response, state_similarity
from swarm.models.exits.model_head import ModelHead
from swarm.models.exits.span_exits import SpanExits
from swarm.models.exits.trained_exits import BaseModel, ExitClassifier, ExitLens, TrainedExits
from swarm.models.loading.span_loading import load_span

THRESHOLDS: dict[ExitConfidence, tuple[float, ...]] = {
    "softmax": (0.9, 0.7, 0.5, 0.3, 0.1),
    "similarity": (0.99, 0.98, 0.97, 0.96, 0.94),
    "classifier": (0.9, 0.8, 0.7, 0.6, 0.5),
}
BATCHES = (1, 4, 16)
WAYS: tuple[tuple[int, ExitBatchRule], ...] = ((1, "row"), (4, "row"), (4, "all"), (16, "row"), (16, "all"))
TRAIN_WINDOWS, TRAIN_TOKENS = 160, 256

COLORS = {"softmax": "#2f6fdf", "similarity": "#d9822b", "classifier": "#3a9d5d"}
LINES = {"exact": "-", "project": "--"}


@torch.no_grad()
def train(
    model: Any, windows_WT: torch.Tensor, exits: Sequence[int]
) -> tuple[dict[int, ExitLens], dict[int, ExitClassifier]]:
    """Lenses and classifiers, as `model.train_exits` makes them from what servers answer."""
    blocks = model.config.num_hidden_layers

    def read(hidden_NH: torch.Tensor) -> torch.Tensor:
        return read_hidden(model, hidden_NH)

    fits = {block: LensFit(model.config.hidden_size, read) for block in exits}
    seen: dict[int, torch.Tensor] = {}
    batches = windows_WT.split(8)
    for number, rows in enumerate(batches):
        states, _ = states_behind(model, rows, (*exits, blocks))
        for block, hidden_RTH in states.items():
            before = [seen[block]] if block in seen else []
            seen[block] = torch.cat([*before, hidden_RTH.flatten(0, 1)])[-KEPT_TOKENS:]
        for block, fit in fits.items():
            fit.learn(seen[block], seen[blocks], rows.numel(), number / len(batches))
    lenses = {block: fit.lens() for block, fit in fits.items()}
    full_N = read(seen[blocks]).argmax(-1)
    classifiers = {
        block: fit_classifier(seen[block], read(lens(seen[block])).argmax(-1) == full_N)
        for block, lens in lenses.items()
    }
    return lenses, classifiers


@torch.no_grad()
def look(
    model: Any,
    windows_WT: torch.Tensor,
    lenses: Mapping[int, ExitLens],
    classifiers: Mapping[int, ExitClassifier],
) -> tuple[dict[int, AtExit], AtExit]:
    """All tokens at each exit, and behind the last block."""
    inputs_WT, targets_WT = windows_WT[:, :-1], windows_WT[:, 1:]
    passed = sorted({block - back for block in lenses for back in (0, 1)})
    states, logits_WTV = states_behind(model, inputs_WT, passed)
    found = {}
    for block, lens in lenses.items():
        early_WTV = read_hidden(model, lens(states[block]))
        confidence = {
            "softmax": softmax_response(early_WTV.flatten(0, 1)).view(inputs_WT.shape),
            "similarity": state_similarity(states[block - 1], states[block]),
            "classifier": classifiers[block](states[block]),
        }
        found[block] = _at(confidence, early_WTV, targets_WT)
    return found, _at({}, logits_WTV, targets_WT)


def _at(confidence: Mapping[str, torch.Tensor], logits_WTV: torch.Tensor, targets_WT: torch.Tensor) -> AtExit:
    nats_WT = cross_entropy(logits_WTV.flatten(0, 1), targets_WT.flatten(), reduction="none").view(targets_WT.shape)
    return AtExit(confidence, logits_WTV.argmax(-1), nats_WT)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        speed: tokens/s relative to computing all blocks, for projected fill; None where nothing is skipped.
    """

    confidence: ExitConfidence
    threshold: float
    fill: str
    batch: int
    rule: ExitBatchRule
    quality: Quality
    speed: float | None = None


@dataclass
class Decoder:
    """Decodes held-out texts token by token in one span, as a server does.

    Args:
        model: of transformers, for embeddings, norm and head.
        span: all blocks.
        windows_WT: the texts.
    """

    model: Any
    span: SpanModel
    lenses: Mapping[int, ExitLens]
    windows_WT: torch.Tensor

    @torch.no_grad()
    def run(self, batch: int, terms: ExitThresholds | None) -> tuple[torch.Tensor, AtExit, float]:
        """Where tokens left `[W, T]`, what was read there, and the seconds that the span took."""
        inputs_WT, targets_WT = self.windows_WT[:, :-1], self.windows_WT[:, 1:]
        embedded_WTH = self.model.get_input_embeddings()(inputs_WT)
        hidden, left, seconds = [], [], 0.0
        for rows_RTH in embedded_WTH.split(batch):
            cache, began = SessionCache(self.span), time.perf_counter()
            steps = [self._step(cache, rows_RTH[:, at], at, terms) for at in range(rows_RTH.shape[1])]
            seconds += time.perf_counter() - began
            hidden.append(torch.stack([output_RH for output_RH, _ in steps], 1))
            left.append(torch.tensor([blocks for _, blocks in steps]).T)
        left_WT, hidden_WTH = torch.cat(left), torch.cat(hidden).clone()
        for block, lens in self.lenses.items():
            hidden_WTH = torch.where((left_WT == block).unsqueeze(-1), lens(hidden_WTH), hidden_WTH)
        return left_WT, _at({}, read_hidden(self.model, hidden_WTH), targets_WT), seconds

    def _step(
        self, cache: SessionCache, hidden_RH: torch.Tensor, position: int, terms: ExitThresholds | None
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        nowhere = (0,) * len(hidden_RH)
        layout = StepLayout((position,) * len(hidden_RH), (1,) * len(hidden_RH), None, None)
        step = cache.start_step(hidden_RH, layout, StepExits(terms, nowhere) if terms is not None else None)
        advance_steps([(step, step.tokens_left)])
        step.commit()
        return step.output, step.exits.left if step.exits is not None else nowhere


def exact_rows(exits: Mapping[int, AtExit], full: AtExit, blocks: int) -> list[Row]:
    """All thresholds, batches and rules, with the caches that a text without exits has."""
    rows = []
    for kind, thresholds in THRESHOLDS.items():
        confidence = {block: at.confidence[kind] for block, at in exits.items()}
        for threshold in thresholds:
            for batch, rule in WAYS:
                left_WT = leave(confidence, threshold, batch, rule)
                rows.append(Row(kind, threshold, "exact", batch, rule, quality(left_WT, exits, full, blocks)))
    return rows


def projected_rows(decoder: Decoder, exits: Sequence[int], full: AtExit, blocks: int) -> list[Row]:
    """All thresholds, batches and rules, with caches that are filled from the hidden states where tokens left."""
    rows = []
    decoder.run(BATCHES[-1], None)  # the first run warms up
    for kind, thresholds in THRESHOLDS.items():
        for threshold in thresholds:
            for batch, rule in WAYS:
                terms = ExitThresholds(kind, tuple((block, threshold) for block in exits), rule)
                plain = decoder.run(batch, None)[2]
                left_WT, found, seconds = decoder.run(batch, terms)
                worth = measured(left_WT, found.token, found.nats, full, blocks)
                rows.append(Row(kind, threshold, "project", batch, rule, worth, plain / seconds))
        print(f"{kind}: measured", flush=True)
    return rows


def single_table(rows: Sequence[Row]) -> str:
    """Format single sequences in Markdown: each confidence and threshold, by fill."""
    lines = []
    for row in rows:
        if row.batch == 1:
            worth = row.quality
            shares = [f"{worth.left:.0%}", f"{worth.skipped:.0%}", f"{worth.agreement:.1%}", f"{worth.perplexity:+.1%}"]
            speed = f"{row.speed:.2f}" if row.speed is not None else ""
            lines.append([f"{row.confidence} > {row.threshold:g}", row.fill, *shares, speed])
    return table(["leaves if", "fill", "left", "blocks skipped", "agree", "perplexity", "times plain"], lines)


def batch_table(rows: Sequence[Row]) -> str:
    """Format batches in Markdown: what is skipped, and how quick that is, by batch and rule, for projected fill."""
    lines = []
    chosen = [row for row in rows if row.fill == "project"]
    for kind, threshold in dict.fromkeys((row.confidence, row.threshold) for row in chosen):
        found = {(row.batch, row.rule): row for row in chosen if (row.confidence, row.threshold) == (kind, threshold)}
        cells = [f"{row.quality.skipped:.0%}, {row.quality.agreement:.0%}, {row.speed:.2f}" for row in found.values()]
        lines.append([f"{kind} > {threshold:g}", *cells])
    heading = [f"{batch}, {rule}" if batch > 1 else "1" for batch, rule in WAYS]
    return table(["skipped, agree, times plain", *heading], lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw agreement and perplexity against the share of blocks that is skipped, by confidence and fill."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    agreement, perplexity = figure.subplots(1, 2)
    for kind, color in COLORS.items():
        for fill, line in LINES.items():
            chosen = sorted(
                (row.quality for row in rows if (row.confidence, row.fill) == (kind, fill)), key=lambda one: one.skipped
            )
            skipped = [100 * one.skipped for one in chosen]
            label = f"{kind}, {fill}"
            style = {"color": color, "linestyle": line, "marker": "o", "markersize": 3, "label": label}
            agreement.plot(skipped, [100 * one.agreement for one in chosen], **style)
            perplexity.plot(skipped, [100 * one.perplexity for one in chosen], **style)
    agreement.set_ylabel("successors that are the full model's, %", fontsize=8)
    perplexity.set_ylabel("perplexity above the full model's, %", fontsize=8)
    for axis in (agreement, perplexity):
        axis.set_xlabel("blocks skipped, %", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    agreement.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER)
    parser.add_argument("--exits", default="3,6,9")
    parser.add_argument("--windows", type=int, default=16, help="of held-out text; a multiple of 16")
    parser.add_argument("--tokens", type=int, default=128, help="of a window")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.windows % max(BATCHES):
        parser.error(f"--windows: use a multiple of {max(BATCHES)}, the largest batch")
    torch.set_num_threads(1)
    print(", ".join(machine.describe().values()))
    exits = [int(block) for block in arguments.exits.split(",")]
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    checkpoint = open_checkpoint(str(arguments.model))
    train_WT, held_out_WT = windows(arguments)
    lenses, classifiers = train(model, train_WT, exits)
    found, full = look(model, held_out_WT, lenses, classifiers)
    trained = TrainedExits(BaseModel("", "", model.config.hidden_size, checkpoint.blocks), lenses, classifiers)
    loaded = load_span(checkpoint, Span(0, checkpoint.blocks), dtype=torch.float32, device=torch.device("cpu"))
    span = choose_forward(loaded).with_exits(
        SpanExits(tuple(exits), ModelHead(checkpoint, torch.float32, torch.device("cpu")), trained)
    )
    choose_exit_forwards(span)
    rows = exact_rows(found, full, checkpoint.blocks)
    rows += projected_rows(Decoder(model, span, lenses, held_out_WT), exits, full, checkpoint.blocks)
    print(f"\nOne sequence\n\n{single_table(rows)}\n\nBatches, projected fill\n\n{batch_table(rows)}")
    if arguments.picture is not None:
        draw([row for row in rows if row.batch == 1], arguments.picture)
    if arguments.json is not None:
        results = [asdict(row) for row in rows]
        arguments.json.write_text(json.dumps({"machine": machine.describe(), "rows": results}, indent=2))


def windows(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids to learn from `[W, 256]`, and held-out ones `[W, T + 1]`, spread over all texts."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    def spread_out(texts: Sequence[str], length: int, count: int) -> torch.Tensor:
        ids = [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts]
        cut = torch.cat([torch.tensor(one[: len(one) // length * length]).view(-1, length) for one in ids])
        order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(0))
        return cut[order[:count]]

    train_texts, held_out = read_texts(arguments.text)
    return (
        spread_out(train_texts, TRAIN_TOKENS, TRAIN_WINDOWS),
        spread_out([held_out], arguments.tokens + 1, arguments.windows),
    )


if __name__ == "__main__":
    main()
