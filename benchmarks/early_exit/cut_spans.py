"""Exact exits inside one server: a client cuts its span into successive hops, and looks at tokens between them.

    python -m benchmarks.early_exit.cut_spans [--models demo,small] [--thresholds 0,0.3] [--late 0.2] [--tokens 48]
        [--repeats 5] [--json FILE]

One server holds all 12 blocks, and one client writes four greedy texts, on two cores without delay: plainly, and with
`EarlyExit(boundaries=...)` at a third and at half of the blocks, verified and not. All take turns; verified texts are
compared with plain ones. "Accepted" are tokens that left and stood, as a share of all tokens.

The demo model was trained for exits. The small shape has random weights, and what its blocks from the first boundary
on add to hidden states is scaled by `--late`, so that early tokens often are the full model's: with 0 always.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import machine
from benchmarks.common.shapes import SHAPES
from benchmarks.common.tables import spread, table, times
from benchmarks.early_exit.__main__ import PROMPTS, Exits, Row, write
from swarm import AutoDistributedModelForCausalLM, EarlyExit
from swarm.cli.local_swarm import LocalSwarm
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.p2p import quiet_hivemind

BLOCKS = 12
CUTS = (BLOCKS // 3, BLOCKS // 2)
PROMPT_TOKENS = 16


def rows(thresholds: Sequence[float]) -> list[Row]:
    """Plain generation, then each cut, verified with all thresholds, and with tokens that stand."""
    found = [Row("none", None)]
    for cut in CUTS:
        for verify in (True, False):
            found += [
                Row(
                    f"block {cut}, softmax > {one:g}, {'verified' if verify else 'unverified'}",
                    EarlyExit(threshold=one, verify=verify, boundaries=(cut,)),
                )
                for one in thresholds
            ]
    return found


def small_model(folder: Path, late: float) -> Path:
    """Save a model of the small shape with 12 blocks whose later ones add little."""
    torch.manual_seed(0)
    config = SHAPES["small"]
    config.num_hidden_layers = BLOCKS
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    model: Any = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers[CUTS[0] :]:
        for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
            product.weight.data.mul_(late)
    model.save_pretrained(folder)
    return folder


def prompts_for(name: str, config: Any) -> list[torch.Tensor]:
    """Four prompts `[1, tokens]`."""
    if name == "demo":
        tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
        return [torch.tensor([tokenizer(one)["input_ids"]]) for one in PROMPTS]
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size, (1, PROMPT_TOKENS), generator=draw) for _ in PROMPTS]


@contextmanager
def one_server(path: Path) -> Iterator[Any]:
    """Yield a client of a server with all blocks."""
    options = ("--threads", "1", "--throughput", "1000", "--dtype", "float32")
    with LocalSwarm(str(path), [f"0:{BLOCKS}"], options=options) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(
            path, initial_peers=[swarm.address], wire="none", dtype="float32"
        )
        yield model
        model.swarm.close()


def measure(model: Any, name: str, found: Sequence[Row], tokens: int, repeats: int) -> None:
    """Fill in the rows, which take turns."""
    prompts = prompts_for(name, model.config)
    for row in found:
        write(model, prompts[0], row, 8)  # the first texts warm up
    for _ in range(repeats):
        expected: list[torch.Tensor] = []
        for row in found:
            row.exits = Exits()
            texts = [write(model, prompt_1T, row, tokens) for prompt_1T in prompts]
            row.seconds.append(sum(seconds for _, seconds in texts))
            expected = expected or [text for text, _ in texts]
            verified = row.options is None or row.options.verify
            if verified and not all(text.equal(one) for (text, _), one in zip(texts, expected, strict=True)):
                raise SystemExit(f"{row.name}: the tokens differ from those of plain generation")


def results(found: Sequence[Row], tokens: int) -> str:
    """Format in Markdown."""
    lines, total = [], len(PROMPTS) * tokens
    for row in found:
        left, stood = (sum(one.values()) for one in (row.exits.left, row.exits.stood))
        verified = row.options is not None and row.options.verify
        rates = spread([total / seconds for seconds in row.seconds], 1)
        accepted = f"{stood / total:.0%}" if verified else ""
        shares = (f"{left / total:.0%}", accepted) if row.options is not None else ("", "")
        lines.append((row.name, rates, times(found[0].seconds, row.seconds), *shares))
    return table(("exits", "tokens/s", "times plain", "left", "accepted"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo,small")
    parser.add_argument("--thresholds", default="0,0.3")
    parser.add_argument("--late", type=float, default=0.2, help="of what late blocks of the small shape add")
    parser.add_argument("--tokens", type=int, default=48, help="of each of four texts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    print(", ".join(machine.describe().values()), flush=True)
    thresholds = [float(one) for one in arguments.thresholds.split(",")]
    measured: dict[str, Any] = {}
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = DEMO_FOLDER if name == "demo" else small_model(Path(folder), arguments.late)
            with one_server(path) as model:
                found = rows(thresholds)
                measure(model, name, found, arguments.tokens, arguments.repeats)
        print(f"\n{name}; median (range) of {arguments.repeats}\n\n{results(found, arguments.tokens)}", flush=True)
        measured[name] = {row.name: row.seconds for row in found}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine.describe(), "seconds": measured}, indent=2))


if __name__ == "__main__":
    main()
