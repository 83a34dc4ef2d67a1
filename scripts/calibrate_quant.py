"""Measures the loss of quality of trained models with each quantization, and writes the table of docs/quantization.md.

    python -m scripts.calibrate_quant texts/*.txt [--other wikitext.txt] [--models FOLDER ...]

The whole model runs in this process, all blocks in one form; embeddings and head, which are the client's, stay as they
are. Everything is compared with blocks that are not quantized, computing in float32. The last 2 % of each text is what
is measured on; `--other` is a text of another kind. The forms of a GPU run on the CPU: the same weights, and inputs
rounded alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from scripts.calibrate_wire import WINDOW, read_texts, windows_of
from scripts.wire_damage import ChainLayer, Damage
from swarm.data_structures import Span
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER, open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from swarm.models.weights import frozen_linear
from swarm.models.weights.quantization import INT4, INT8, NF4, NONE, Nf4Linear, quantizable, weight_bytes
from swarm.models.weights.weight_only import TwoDigitInt8Linear

CPU = torch.device("cpu")
MARK = "<!-- table of scripts/calibrate_quant.py -->"
ROWS = 8
"""Windows computed at once."""


class _Plain:
    """An empty mix-in for the client's model, which needs none in a single process."""


def loaded(folder: Path, form: str, dtype: torch.dtype = torch.float32) -> SpanModel:
    """Quantize all blocks as a server does on a CPU."""
    checkpoint = open_checkpoint(folder)
    return load_span(checkpoint, Span(0, checkpoint.blocks), dtype=dtype, device=CPU, quant=form)


def as_on_a_gpu(folder: Path, form: str) -> SpanModel:
    """Quantize all blocks as on a GPU."""
    with mock.patch.object(frozen_linear, "can_prepack", return_value=False):
        span = loaded(folder, NONE)

    def replacement(plain: nn.Linear) -> nn.Module | None:
        if not quantizable(plain, form):
            return None
        return TwoDigitInt8Linear(plain) if form == INT8 else Nf4Linear(plain, CPU)

    frozen_linear.replace_linears(span.module, replacement)
    span.weight_bytes = weight_bytes(span.module)
    return span


EXACT = "none, float32"
FORMS: dict[str, Callable[[Path], SpanModel]] = {
    EXACT: lambda folder: loaded(folder, NONE),
    "none, bfloat16": lambda folder: loaded(folder, NONE, torch.bfloat16),
    "int8 (CPU)": lambda folder: loaded(folder, INT8),
    "int4 (CPU)": lambda folder: loaded(folder, INT4),
    "int8 (GPU)": lambda folder: as_on_a_gpu(folder, INT8),
    "nf4 (GPU)": lambda folder: as_on_a_gpu(folder, NF4),
}


@torch.inference_mode()
def log_probabilities(folder: Path, span: SpanModel, windows: Tensor) -> Tensor:
    """Of every next token, `[rows, tokens, vocabulary]`."""
    checkpoint = open_checkpoint(folder)
    layer = ChainLayer(span, checkpoint.structure.layer_outputs)
    model = load_blockless_model(checkpoint, layer, _Plain, dtype=span.dtype).model
    return torch.cat(
        [model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1) for ids in windows.split(ROWS)]
    )


def measure(folder: Path, text: str) -> dict[str, tuple[float, Damage]]:
    """Bytes of a block's weights, and what changed, by form."""
    windows = windows_of(text, AutoTokenizer.from_pretrained(folder), WINDOW)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    found: dict[str, tuple[float, Damage]] = {}
    exact: Tensor | None = None
    for name, make in FORMS.items():
        span, damage = make(folder), Damage()
        came = log_probabilities(folder, span, inputs)
        exact = came if exact is None else exact
        damage.add(exact, came, targets)
        found[name] = span.weight_bytes / span.span.length, damage
        if name == EXACT:
            loss = -float(came.gather(-1, targets.unsqueeze(-1)).mean())
            print(f"{folder.name}: perplexity {torch.tensor(loss).exp():.2f} over {targets.numel()} tokens")
    return found


def rows(title: str, found: dict[str, tuple[float, Damage]]) -> list[str]:
    """Format one line per form of the weights."""
    whole = found[EXACT][0]
    return [
        f"| {title} | {name} | {size / whole:.3f} | {damage.perplexity:+.2f} ± {damage.uncertainty:.2f} "
        f"| {damage.divergence:.1e} | {damage.greedy_changed:.2f} % |"
        for name, (size, damage) in found.items()
        if name != EXACT
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="UTF-8 text files")
    parser.add_argument("--other", type=Path, help="a text of another kind to measure on")
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders of trained models")
    parser.add_argument("--page", type=Path, default=Path("docs/quantization.md"))
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    texts: dict[str, Any] = {"held-out texts": read_texts(options.texts)[1]}
    if options.other:
        texts["other text"] = options.other.read_text("utf-8")
    lines = [
        "| model | form | bytes, of float32 | perplexity % | KL, nats | greedy changed |",
        f"|{' --- |' * 6}",
    ]
    for folder in (DEMO_FOLDER, *options.models):
        if not folder.is_dir():
            print(f"{folder} is not here; left out")
            continue
        for name, text in texts.items():
            lines += rows(f"{folder.name}, {name}", measure(folder, text))
    table = "\n".join(lines)
    print(table)
    before, _, after = options.page.read_text("utf-8").split(MARK)
    options.page.write_text(f"{before}{MARK}\n\n{table}\n\n{MARK}{after}", "utf-8")


if __name__ == "__main__":
    main()
