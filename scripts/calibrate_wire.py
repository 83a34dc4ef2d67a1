"""Measures the loss of quality of each wire format with models of many families, and writes the table of docs/wire.md.

    python -m scripts.calibrate_wire texts/*.txt [--other wikitext.txt] [--models FOLDER ...] [--families llama opt ...]

Models with weights of their own: the package's demo model and `--models`. For every other family a small model is
trained first (`scripts/trained_zoo.py`), a minute or so each. The last 2 % of each text is what is measured on;
`--other` is a text of another kind, for the models that were trained elsewhere. What was measured once lies in `--work`
and is taken from there the next time, so a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from scripts.train_demo_model import HELD_OUT, clean
from scripts.trained_zoo import FAMILIES, trained
from scripts.wire_damage import Damage, InProcess, Variant, measure
from swarm.data_structures import WireFormat
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.wire_defaults import CALIBRATION_HOPS, MAX_PERPLEXITY_CHANGE_PERCENT, OUTLIER_FACTOR
from swarm.protocol.compression import payload_bytes

MARK = "<!-- {} of scripts/calibrate_wire.py -->"
WINDOW, WINDOWS = 256, 64
SHORT = 128
"""Tokens a window of the small models, which know no longer texts."""
FORMATS = (WireFormat.FLOAT16, WireFormat.BFLOAT16, WireFormat.BLOCKWISE8)
LEARNT = 290.0
"""The perplexity that a small model has to reach before its figures say anything: half of that of counting tokens."""

STRESS = (OUTLIER_FACTOR, 100.0, 1000.0)

Row = dict[str, Any]


def read_texts(paths: Iterable[Path]) -> tuple[list[str], str]:
    """Split texts into training data and held-out ends."""
    texts = [clean(path.read_text("utf-8-sig")) for path in paths]
    cuts = [text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1 for text in texts]
    pairs = list(zip(texts, cuts, strict=True))
    return [text[:cut] for text, cut in pairs], "".join(text[cut:] for text, cut in pairs)


def windows_of(text: str, tokenizer: Any, length: int) -> Tensor:
    """`[WINDOWS, length + 1]` token ids, spread over the text."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    count = min(WINDOWS, len(ids) // (length + 1))
    starts = torch.linspace(0, len(ids) - length - 1, count).long()
    return torch.stack([ids[start : start + length + 1] for start in starts])


def variants_of(blocks: int) -> list[Variant]:
    """Every format with one server, `CALIBRATION_HOPS`, and many; then 8 bits with channels that stand out."""
    hops = sorted({1, CALIBRATION_HOPS, min(8, blocks)})
    plain = [Variant(wire, count) for wire in FORMATS for count in hops]
    return plain + [Variant(WireFormat.BLOCKWISE8, CALIBRATION_HOPS, times) for times in STRESS]


def calibrate(model: InProcess, windows: Tensor) -> Row:
    """The figures of one model and text, as they are kept."""
    perplexity, found = measure(model, windows, variants_of(model.blocks))
    return {
        "family": model.family,
        "blocks": model.blocks,
        "hidden_size": model.hidden_size,
        "perplexity": perplexity,
        "tokens": windows.shape[0] * (windows.shape[1] - 1),
        "largest": model.layer.largest,
        "typical": model.layer.typical,
        "damage": [_figures(variant, damage) for variant, damage in found.items()],
    }


def _figures(variant: Variant, damage: Damage) -> Row:
    return {
        "wire": variant.wire.value,
        "hops": variant.hops,
        "outliers": variant.outliers,
        "perplexity": damage.perplexity,
        "uncertainty": damage.uncertainty,
        "divergence": damage.divergence,
        "greedy_changed": damage.greedy_changed,
    }


def kept(path: Path, make: Any) -> Row:
    """Read the results from the file, or measure them if there is no file."""
    if not path.exists():
        row = make()
        path.write_text(json.dumps(row, indent=1))
        print(f"{row['family']}: perplexity {row['perplexity']:.1f} -> {path}", flush=True)
    result: Row = json.loads(path.read_text())
    return result


def own_weights(options: argparse.Namespace, held_out: str) -> dict[str, Row]:
    """Measure models with weights of their own, on both texts."""
    texts = {"held-out texts": held_out}
    if options.other:
        texts["other text"] = options.other.read_text("utf-8")
    rows = {}
    for folder in (DEMO_FOLDER, *options.models):
        if not folder.is_dir():
            print(f"{folder} is not here; left out")
            continue
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for dtype in ("float32", "bfloat16"):
            for name, text in texts.items():
                file = options.work / f"{folder.name} {dtype} {name}.json"
                windows = windows_of(text, tokenizer, WINDOW)
                title = f"{folder.name}, {dtype}, {name}"
                rows[title] = kept(file, lambda f=folder, d=dtype, w=windows: calibrate(InProcess(f, d), w))
    return rows


def small_models(options: argparse.Namespace, train: Sequence[str], held_out: str) -> dict[str, Row]:
    """Measure a model of each family that was trained for this purpose."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    ids = [torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) for text in train]
    windows = windows_of(held_out, tokenizer, SHORT)

    def make(family: str) -> Row:
        folder = trained(family, options.work / "models", ids, len(tokenizer), options.steps, options.seed)
        return calibrate(InProcess(folder), windows)

    return {family: kept(options.work / f"{family}.json", lambda f=family: make(f)) for family in options.families}


# The page


def harmless(row: Row) -> bool:
    """The rule of `swarm.models.wire_defaults`; a model that has learnt nothing proves nothing."""
    if row["perplexity"] > LEARNT:
        return False
    found = [_find(row, WireFormat.BLOCKWISE8, CALIBRATION_HOPS, times) for times in (1.0, OUTLIER_FACTOR)]
    return all(abs(one["perplexity"]) + one["uncertainty"] < MAX_PERPLEXITY_CHANGE_PERCENT for one in found)


def _find(row: Row, wire: WireFormat, hops: int, outliers: float = 1.0) -> Row:
    wanted = (wire, hops, outliers)
    return next(one for one in row["damage"] if (one["wire"], one["hops"], one["outliers"]) == wanted)


def _percent(figures: Row, digits: int = 3) -> str:
    return f"{figures['perplexity']:+.{digits}f} ± {figures['uncertainty']:.{digits}f}"


def format_rows(rows: dict[str, Row]) -> str:
    """Format one line per model and format."""
    lines = [
        f"| model | format | bytes a token | perplexity %, 1 hop | {CALIBRATION_HOPS} hops | most | KL, nats "
        f"| greedy changed | {OUTLIER_FACTOR:.0f} × |",
        f"|{' --- |' * 9}",
    ]
    for title, row in rows.items():
        most = min(8, row["blocks"])
        for wire in FORMATS:
            one, some, many = (_find(row, wire, hops) for hops in (1, CALIBRATION_HOPS, most))
            stressed = (
                _percent(_find(row, wire, CALIBRATION_HOPS, OUTLIER_FACTOR)) if wire is WireFormat.BLOCKWISE8 else ""
            )
            size = payload_bytes(row["hidden_size"], wire, "float32")
            lines.append(
                f"| {title} | {wire} | {size} | {_percent(one)} | {_percent(some)} | {_percent(many)} ({most}) "
                f"| {some['divergence']:.1e} | {some['greedy_changed']:.2f} % | {stressed} |"
            )
    return "\n".join(lines)


def family_rows(rows: dict[str, Row]) -> str:
    """Format one line per family: the default, and why."""
    lines = [
        f"| family | default | perplexity % | greedy changed | {' | '.join(f'{times:.0f} ×' for times in STRESS)} "
        "| largest | perplexity |",
        f"|{' --- |' * (6 + len(STRESS))}",
    ]
    for family, row in sorted(rows.items()):
        found = _find(row, WireFormat.BLOCKWISE8, CALIBRATION_HOPS)
        stress = " | ".join(_percent(_find(row, WireFormat.BLOCKWISE8, CALIBRATION_HOPS, times), 2) for times in STRESS)
        lines.append(
            f"| {family} | {'blockwise8' if harmless(row) else '16 bits'} | {_percent(found)} "
            f"| {found['greedy_changed']:.1f} % | {stress} | {row['largest']:.3g} | {row['perplexity']:.0f} |"
        )
    return "\n".join(lines)


def put(page: str, name: str, text: str) -> str:
    """Replace the part of the page between two markers."""
    mark = MARK.format(name)
    before, _, after = page.split(mark)
    return f"{before}{mark}\n\n{text}\n\n{mark}{after}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="UTF-8 text files")
    parser.add_argument("--other", type=Path, help="a text of another kind to measure on")
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders of trained models")
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="families to train small models of")
    parser.add_argument("--steps", type=int, default=250, help="of training, for each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/wire"), help="folder of models and figures")
    parser.add_argument("--page", type=Path, default=Path("docs/wire.md"))
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    (options.work / "models").mkdir(parents=True, exist_ok=True)
    train, held_out = read_texts(options.texts)
    real = own_weights(options, held_out)
    small = small_models(options, train, held_out)
    page = options.page.read_text("utf-8")
    page = put(page, "models", format_rows(real))
    if small:
        page = put(put(page, "defaults", family_rows(small)), "families", format_rows(small))
    options.page.write_text(page, "utf-8")
    print("BLOCKWISE8 =", sorted(family for family, row in small.items() if harmless(row)))


if __name__ == "__main__":
    main()
