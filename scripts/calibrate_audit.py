"""Measures how far honest machines and frauds differ in audits, and writes the table of docs/trust.md.

    python -m scripts.calibrate_audit texts/*.txt [--models FOLDER ...] [--families llama mixtral ...] [--samples 16]

The claimed results are computed as servers compute them for clients: token by token, alone or together with other
sessions, in chunks, in either cache layout, with other threads and other instructions of the processor (oneDNN's limit,
in a process of its own). The audit computes the same inputs at once. Frauds announce what the audit computes, and hold
other weights. Every pair is one audit, with the very functions by which clients decide.

Models with weights of their own: the package's demo model and `--models`. For other families a small model is trained
first (`scripts/trained_zoo.py`). What was measured once lies in `--work` and is taken from there the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.calibrate_wire import read_texts, windows_of
from scripts.trained_zoo import trained
from swarm.common.dtypes import dtype_name
from swarm.data_structures import Span, StepLayout, WireFormat
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER, open_checkpoint
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import choose_forward
from swarm.models.loading.span_loading import load_span
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.routing.suspicion import Agreement
from swarm.trust.comparison import TOLERANCE, Difference, difference

CPU = torch.device("cpu")
MARK = "<!-- table of scripts/calibrate_audit.py -->"
TOKENS, PROMPT, CHUNK, TOGETHER = 64, 16, 16, 4
FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "falcon", "bloom", "granite")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIRES = (WireFormat.NONE, WireFormat.BFLOAT16, WireFormat.BLOCKWISE8)
INSTRUCTIONS = {"all": {}, "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
REFERENCE, FRAUDS = "at once", ("int8", "int4", "other weights")
OTHER_WEIGHTS = 0.01
"""By how much the weights of another version differ, relative to each."""

Outputs = dict[str, list[Tensor]]
Row = dict[str, Any]


# In a process of its own, because the instructions are chosen when it starts


@torch.inference_mode()
def compute_all(folder: Path, other: Path, case: dict[str, Any], is_main: bool) -> Outputs:
    """The outputs of every way to compute one span in one dtype, `[TOKENS, hidden]` for each sample."""
    span, dtype, inputs = Span(*case["span"]), case["dtype"], case["inputs"]

    def model(quant: str = "none", layout: Any = "auto", source: Path = folder) -> SpanModel:
        loaded = load_span(open_checkpoint(source), span, dtype=dtype, device=CPU, quant=quant, layout=layout)
        return choose_forward(loaded) if layout == "auto" else loaded

    honest = model()
    found = {REFERENCE: at_once(honest, inputs), "token by token": by_token(honest, inputs)}
    if not is_main:
        return found
    found["four sessions together"] = together(honest, inputs)
    torch.set_num_threads(2)
    found["in chunks, two threads"] = in_chunks(honest, inputs)
    torch.set_num_threads(1)
    found["padded layout"] = by_token(model(layout="padded"), inputs)
    for form in ("int8", "int4"):
        found[form] = by_token(model(form), inputs)
    found["other weights"] = by_token(model(source=other), inputs)
    return found


def steps(model: SpanModel, hidden: Tensor, sizes: Iterable[int]) -> Tensor:
    """One session, so many tokens a step."""
    cache, outputs, start = SessionCache(model), [], 0
    for size in sizes:
        outputs.append(cache.step(hidden[start : start + size].to(model.dtype), StepLayout((start,), (size,))))
        start += size
    return torch.cat(outputs).float()


def at_once(model: SpanModel, inputs: list[Tensor]) -> list[Tensor]:
    return [steps(model, hidden, [TOKENS]) for hidden in inputs]


def by_token(model: SpanModel, inputs: list[Tensor]) -> list[Tensor]:
    return [steps(model, hidden, [PROMPT, *[1] * (TOKENS - PROMPT)]) for hidden in inputs]


def in_chunks(model: SpanModel, inputs: list[Tensor]) -> list[Tensor]:
    return [steps(model, hidden, [CHUNK] * (TOKENS // CHUNK)) for hidden in inputs]


def together(model: SpanModel, inputs: list[Tensor]) -> list[Tensor]:
    """Sequences in one forward, token by token, beginning with prompts of different lengths."""
    outputs = []
    for first in range(0, len(inputs), TOGETHER):
        group = inputs[first : first + TOGETHER]
        cache, rows = SessionCache(model), [[] for _ in group]
        done = [0] * len(group)
        while min(done) < TOKENS:
            counts = [min(TOKENS - have, PROMPT + row if not have else 1) for row, have in enumerate(done)]
            new = torch.cat([one[have : have + n] for one, have, n in zip(group, done, counts, strict=True)])
            out = cache.step(new.to(model.dtype), StepLayout(tuple(done), tuple(counts))).float()
            for row, piece in zip(rows, out.split(counts), strict=True):
                row.append(piece)
            done = [have + n for have, n in zip(done, counts, strict=True)]
        outputs += [torch.cat(row) for row in rows]
    return outputs


def altered(folder: Path, target: Path) -> None:
    """A copy of a model after a little more training, as it were."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    noise = torch.Generator().manual_seed(0)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name, one in tensors.items():
            if one.ndim > 1:
                tensors[name] = (one * (1 + OTHER_WEIGHTS * torch.randn(one.shape, generator=noise))).to(one.dtype)
        save_file(tensors, file, {"format": "pt"})


def child(folder: Path, cases: Path, results: Path, is_main: bool) -> None:
    torch.set_num_threads(1)
    found = [
        compute_all(folder, cases.parent / "other", case, is_main) for case in torch.load(cases, weights_only=True)
    ]
    torch.save(found, results)


# The audits


def cases_of(folder: Path, tokenizer: Any, text: str, samples: int) -> list[dict[str, Any]]:
    """The real hidden states in front of both halves of a model, in each dtype."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = windows_of(text, tokenizer, TOKENS)[:samples, :TOKENS]
    blocks = open_checkpoint(folder).blocks
    with torch.inference_mode():
        states = model(windows, output_hidden_states=True).hidden_states
    return [
        {"span": span, "dtype": dtype, "inputs": [one.to(dtype).float() for one in states[span[0]]]}
        for span in ((0, blocks // 2), (blocks // 2, blocks))
        for dtype in DTYPES
    ]


def sent(hidden: Tensor, dtype: torch.dtype, wire: WireFormat) -> Tensor:
    """How it arrives."""
    hidden = hidden.to(dtype)
    return decode_tensor(encode_tensor(hidden, wire), *hidden.shape, wire, dtype_name(dtype), CPU)


def audits_of(folder: Path, tokenizer: Any, text: str, samples: int, work: Path) -> list[Row]:
    """All audits of one model."""
    cases = cases_of(folder, tokenizer, text, samples)
    torch.save(cases, work / "cases.pt")
    altered(folder, work / "other")
    found: dict[str, list[Outputs]] = {}
    for name, environment in INSTRUCTIONS.items():
        command = [sys.executable, "-m", "scripts.calibrate_audit", "--child", str(folder), str(work), name]
        subprocess.run(command, check=True, env={**os.environ, **environment})
        found[name] = torch.load(work / f"{name}.pt", weights_only=True)
    rows = []
    for number, case in enumerate(cases):
        blocks, dtype = case["span"][1] - case["span"][0], case["dtype"]
        references = {name: outputs[number][REFERENCE] for name, outputs in found.items()}
        claims = {(how, name): outputs for name, ways in found.items() for how, outputs in ways[number].items()}
        for wire in WIRES:
            for (how, name), claimed in claims.items():
                for against, recomputed in references.items():
                    if how == REFERENCE and name == against:
                        continue
                    for one, other in zip(claimed, recomputed, strict=True):
                        pair = sent(one, dtype, wire), sent(other, dtype, wire)
                        difference_found = difference(*pair, blocks, dtype_name(dtype), wire)
                        rows.append(row_of(how, dtype, wire, difference_found))
    return rows


def row_of(how: str, dtype: torch.dtype, wire: WireFormat, found: Difference) -> Row:
    return {
        "how": how if how in FRAUDS else "honest",
        "dtype": dtype_name(dtype),
        "wire": wire.value,
        "typical": found.typical,
        "coherence": found.coherence,
        "worst": found.worst,
    }


# The page


def table_of(rows: list[Row]) -> str:
    """A line for each dtype, wire format and kind of server."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["dtype"], row["wire"], row["how"]].append(row)
    lines = [
        "| computes in | wire | server | audits | size, median (largest) | coherence, median (largest) | worst token | "
        "not within tolerance |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (dtype, wire, how), members in groups.items():
        figures = [
            f"{statistics.median(values):.2f} ({max(values):.2f})"
            for values in ([one[name] for one in members] for name in ("typical", "coherence"))
        ]
        failed = sum(agreement_of(one) is not Agreement.SAME for one in members)
        share = f"{failed} of {len(members)}" if how == "honest" else f"{100 * failed / len(members):.1f} %"
        worst = f"{max(one['worst'] for one in members):.1f}"
        lines.append(f"| {dtype} | {wire} | {how} | {len(members)} | {figures[0]} | {figures[1]} | {worst} | {share} |")
    return "\n".join(lines)


def agreement_of(row: Row) -> Agreement:
    return Difference(TOKENS, row["typical"], row["coherence"], row["worst"]).agreement(TOLERANCE)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, help="UTF-8 text files")
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders of trained models")
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="families to train small models of")
    parser.add_argument("--samples", type=int, default=16, help="texts of each model")
    parser.add_argument("--steps", type=int, default=250, help="of training, for each family")
    parser.add_argument("--work", type=Path, default=Path("runs/audit"), help="folder of models and figures")
    parser.add_argument("--page", type=Path, default=Path("docs/trust.md"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.child is not None:
        folder, work, name = options.child
        child(Path(folder), Path(work) / "cases.pt", Path(work) / f"{name}.pt", name == "all")
        return
    torch.set_num_threads(1)
    (options.work / "models").mkdir(parents=True, exist_ok=True)
    train, held_out = read_texts(options.texts)
    demo = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    ids = [torch.tensor(demo(text, add_special_tokens=False, verbose=False).input_ids) for text in train]
    models = {folder.name: (folder, AutoTokenizer.from_pretrained(folder)) for folder in (DEMO_FOLDER, *options.models)}
    for family in options.families:
        models[family] = trained(family, options.work / "models", ids, len(demo), options.steps, 0), demo
    rows: list[Row] = []
    for name, (folder, tokenizer) in models.items():
        file = options.work / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps(audits_of(folder, tokenizer, held_out, options.samples, options.work)))
        own = json.loads(file.read_text())
        honest = [row for row in own if row["how"] == "honest"]
        failed = sum(agreement_of(row) is not Agreement.SAME for row in honest)
        print(f"{name}: {len(own)} audits; {failed} of {len(honest)} honest ones not within tolerance", flush=True)
        rows += own
    page = options.page.read_text("utf-8")
    before, _, after = page.split(MARK)
    options.page.write_text(f"{before}{MARK}\n\n{table_of(rows)}\n\n{MARK}{after}", "utf-8")


if __name__ == "__main__":
    main()
