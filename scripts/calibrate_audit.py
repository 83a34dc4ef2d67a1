"""Measures how far honest machines and frauds differ in audits, and writes the table of docs/trust.md.

    python -m scripts.calibrate_audit texts/*.txt [--models FOLDER ...] [--families llama mixtral ...] [--samples 16]

The claimed results are computed as servers compute them for clients: token by token, alone or together with other
sessions, in chunks, in either cache layout, with other threads, with other instructions of the processor (oneDNN's
limit), and on a GPU, each in a process of its own. The audit computes the same inputs at once. Frauds announce what the
audit computes, and hold other weights. Every pair is one audit, with the very functions by which clients decide.

Models with weights of their own: the package's demo model and `--models`. For other families a small model is trained
first (`scripts/trained_zoo.py`). What was computed once lies in `--work`, a folder for each model, and is taken from
there the next time. So a machine without a GPU can use what one with a GPU has computed: after a first run, copy
`--work` there, run `--child MODEL WORK/NAME GPU` for each model, and copy `WORK/NAME/GPU.pt` back.
"""

from __future__ import annotations

import argparse
import itertools
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
from swarm.trust.comparison import Difference, difference

CPU = torch.device("cpu")
MARK = "<!-- table of scripts/calibrate_audit.py -->"
TOKENS, PROMPT, CHUNK, TOGETHER = 64, 16, 16, 4
FAMILIES = (
    *("llama", "qwen3", "gemma3_text", "phi3", "falcon", "bloom", "granite", "gpt2", "mixtral", "qwen3_moe", "gpt_oss"),
    *("deepseek_v3", "qwen3_5_text", "qwen3_next", "lfm2", "nemotron_h", "falcon_h1", "mamba2"),
)
WIDE = {1024: 125, 2048: 0}
"""Hidden size of models of the llama family, and steps of their training."""

WIDE_FROM = 1024
"""Hidden size of models whose figures are in a table of their own: they are what people run."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIRES = (WireFormat.NONE, WireFormat.BFLOAT16, WireFormat.BLOCKWISE8)
MACHINES = {"all": {}, "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, "GPU": {}}
REFERENCE, FRAUDS = "at once", ("int8", "int4", "other weights")
HONEST_QUANTIZED = {"int8": "int8, at once", "int4": "int4, at once"}
OTHER_WEIGHTS = 0.01
"""By how much the weights of another version differ, relative to each."""

Outputs = dict[str, list[Tensor]]
Row = dict[str, Any]


# In a process of its own, because the instructions are chosen when it starts


@torch.inference_mode()
def compute_all(folder: Path, other: Path, case: dict[str, Any], machine: str) -> Outputs:
    """The outputs of every way to compute one span in one dtype, `[TOKENS, hidden]` for each sample."""
    device = torch.device("cuda" if machine == "GPU" else "cpu")
    span, dtype, inputs = Span(*case["span"]), case["dtype"], [one.to(device) for one in case["inputs"]]

    def model(quant: str = "none", layout: Any = "auto", source: Path = folder) -> SpanModel:
        loaded = load_span(open_checkpoint(source), span, dtype=dtype, device=device, quant=quant, layout=layout)
        return choose_forward(loaded) if layout == "auto" else loaded

    honest = model()
    found = {REFERENCE: at_once(honest, inputs), "token by token": by_token(honest, inputs)}
    if machine == "AVX2":
        return found
    found["four sessions together"] = together(honest, inputs)
    if machine == "GPU":
        return found
    torch.set_num_threads(2)
    found["in chunks, two threads"] = in_chunks(honest, inputs)
    torch.set_num_threads(1)
    found["padded layout"] = by_token(model(layout="padded"), inputs)
    for form, audit in HONEST_QUANTIZED.items():
        quantized = model(form)
        found[form], found[audit] = by_token(quantized, inputs), at_once(quantized, inputs)
    found["other weights"] = by_token(model(source=other), inputs)
    return found


def steps(model: SpanModel, hidden: Tensor, sizes: Iterable[int]) -> Tensor:
    """One session, so many tokens a step."""
    cache, outputs, start = SessionCache(model), [], 0
    for size in sizes:
        outputs.append(cache.step(hidden[start : start + size].to(model.dtype), StepLayout((start,), (size,))))
        start += size
    return torch.cat(outputs).cpu()


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
            out = cache.step(new.to(model.dtype), StepLayout(tuple(done), tuple(counts))).cpu()
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


def child(folder: Path, work: Path, machine: str) -> None:
    torch.set_num_threads(1)
    cases = torch.load(work / "cases.pt", weights_only=True)
    torch.save([compute_all(folder, work / "other", case, machine) for case in cases], work / f"{machine}.pt")


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


def sent(hidden: Tensor, dtype: torch.dtype, wire: WireFormat, sizes: Iterable[int]) -> Tensor:
    """How it arrives, so many tokens a step."""
    steps = [
        decode_tensor(encode_tensor(step, wire), *step.shape, wire, dtype_name(dtype), CPU)
        for step in hidden.to(dtype).split(list(sizes))
    ]
    return torch.cat(steps)


def audits_of(folder: Path, tokenizer: Any, text: str, samples: int, work: Path) -> list[Row]:
    """All audits of one model."""
    work.mkdir(exist_ok=True)
    if not (work / "cases.pt").exists():
        altered(folder, work / "other")
        torch.save(cases_of(folder, tokenizer, text, samples), work / "cases.pt")
    found: dict[str, list[Outputs]] = {}
    for machine, environment in MACHINES.items():
        file = work / f"{machine}.pt"
        if not file.exists() and (machine != "GPU" or torch.cuda.is_available()):
            command = [sys.executable, "-m", "scripts.calibrate_audit", "--child", str(folder), str(work), machine]
            subprocess.run(command, check=True, env={**os.environ, **environment})
        if file.exists():
            found[machine] = torch.load(file, weights_only=True)
    cases = torch.load(work / "cases.pt", weights_only=True)
    return [row for number, case in enumerate(cases) for row in audits_of_span(case, number, found)]


def audits_of_span(case: dict[str, Any], number: int, found: dict[str, list[Outputs]]) -> list[Row]:
    blocks, dtype = case["span"][1] - case["span"][0], case["dtype"]
    claims = {(how, machine): outputs for machine, ways in found.items() for how, outputs in ways[number].items()}
    for fraud in FRAUDS:  # where none of its layers can be quantized, it is none
        if all(map(torch.equal, claims[fraud, "all"], claims["token by token", "all"])):
            del claims[fraud, "all"]
    rows = []
    for wire, (claim, claimed), (audit, recomputed) in itertools.product(WIRES, claims.items(), claims.items()):
        if (kind := kind_of(claim, audit)) is not None:
            for one, other in zip(claimed, recomputed, strict=True):
                pair = sent(one, dtype, wire, [PROMPT, *[1] * (TOKENS - PROMPT)]), sent(other, dtype, wire, [TOKENS])
                form = claim[0] if kind.startswith("honest, int") else "none"
                rows.append(row_of(kind, dtype, wire, difference(*pair, blocks, dtype_name(dtype), form, wire)))
    return rows


def kind_of(claim: tuple[str, str], audit: tuple[str, str]) -> str | None:
    """What the table calls an audit of one way to compute by another one; None if that is no audit."""
    (how, machine), (audit_how, audit_machine) = claim, audit
    if HONEST_QUANTIZED.get(how) == audit_how:
        return f"honest, {how}"
    if claim == audit or audit_how != REFERENCE or how in HONEST_QUANTIZED.values():
        return None
    if how in FRAUDS:
        return how
    return "honest, GPU and CPU" if (machine == "GPU") != (audit_machine == "GPU") else "honest"


def row_of(kind: str, dtype: torch.dtype, wire: WireFormat, found: Difference) -> Row:
    return {
        "kind": kind,
        "dtype": dtype_name(dtype),
        "wire": wire.value,
        "typical": found.typical,
        "coherence": found.coherence,
        "worst": found.worst,
        "same": found.agreement is Agreement.SAME,
    }


# The page


def tables_of(rows: dict[bool, list[Row]]) -> str:
    return "\n\n".join(
        f"{title}:\n\n{table_of(rows[is_wide])}"
        for title, is_wide in ((f"Hidden sizes from {WIDE_FROM} on", True), ("Smaller models", False))
        if rows[is_wide]
    )


def table_of(rows: list[Row]) -> str:
    """A line for each dtype and kind of server: figures without a wire format, results for each."""
    groups: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["dtype"], row["kind"]][row["wire"]].append(row)
    titles = [
        *("computes in", "server", "audits", "size, median (largest)", "coherence, median (largest)", "worst token"),
        f"not within tolerance, over {', '.join(wire.value for wire in WIRES)}",
    ]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for (dtype, kind), by_wire in groups.items():
        shown = by_wire[WireFormat.NONE.value]
        cells = [dtype, kind, str(sum(map(len, by_wire.values())))]
        for values in ([one[name] for one in shown] for name in ("typical", "coherence")):
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})")
        failed = [[not one["same"] for one in by_wire[wire.value]] for wire in WIRES]
        worst = f"{max(one['worst'] for one in shown):.1f}"
        lines.append("| " + " | ".join([*cells, worst, ", ".join(share_of(one, kind) for one in failed)]) + " |")
    return "\n".join(lines)


def share_of(failed: list[bool], kind: str) -> str:
    return f"{sum(failed)}" if kind.startswith("honest") else f"{100 * sum(failed) / len(failed):.0f} %"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, help="UTF-8 text files")
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders of trained models")
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="families to train small models of")
    parser.add_argument("--samples", type=int, default=16, help="texts of each model")
    parser.add_argument("--steps", type=int, default=250, help="of training, for each family")
    parser.add_argument("--work", type=Path, default=Path("runs/audit"), help="folder of models and figures")
    parser.add_argument("--page", type=Path, default=Path("docs/trust.md"))
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "WORK", "MACHINE"), help="compute one model only")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.child is not None:
        folder, work, machine = options.child
        child(Path(folder), Path(work), machine)
        return
    torch.set_num_threads(1)
    (options.work / "models").mkdir(parents=True, exist_ok=True)
    train, held_out = read_texts(options.texts)
    demo = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    ids = [torch.tensor(demo(text, add_special_tokens=False, verbose=False).input_ids) for text in train]
    models = {folder.name: (folder, AutoTokenizer.from_pretrained(folder)) for folder in (DEMO_FOLDER, *options.models)}
    for family in options.families:
        models[family] = trained(family, options.work / "models", ids, len(demo), options.steps, 0), demo
    for hidden, steps in WIDE.items():
        folder = trained("llama", options.work / "models", ids, len(demo), steps, 0, hidden)
        models[folder.name] = folder, demo
    rows: dict[bool, list[Row]] = {True: [], False: []}
    for name, (folder, tokenizer) in models.items():
        own = audits_of(folder, tokenizer, held_out, options.samples, options.work / name)
        honest = [row for row in own if row["kind"].startswith("honest")]
        failed = sum(not row["same"] for row in honest)
        print(f"{name}: {len(own)} audits; {failed} of {len(honest)} honest ones not within tolerance", flush=True)
        rows[open_checkpoint(folder).config.hidden_size >= WIDE_FROM] += own
    page = options.page.read_text("utf-8")
    before, _, after = page.split(MARK)
    options.page.write_text(f"{before}{MARK}\n\n{tables_of(rows)}\n\n{MARK}{after}", "utf-8")


if __name__ == "__main__":
    main()
