"""Early exit between servers: tokens a second against plain generation, and how near that is to what exits allow.

    python -m benchmarks.early_exit --text texts/*.txt [--servers 3,4] [--delay 0.05] [--thresholds 0,0.1,0.3]
        [--unverified 0.3] [--tokens 48] [--repeats 3] [--json FILE]

The demo model over real libp2p processes whose streams deliver everything with a delay (`benchmarks.common.delayed`),
and once without delay. Lenses are trained over the same swarm on the first texts, `--train-tokens` of them. Plain
generation and all thresholds take turns; texts that are verified are compared with the local model's, token for token.

The bound follows from what happened to each token: with a delay of d, a token that leaves behind the k-th of N servers
and stands costs (k + 1) d; one that stays to the end, or does not stand, (N + 1) d, as every token does without exits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import machine
from benchmarks.common.shapes import split_blocks
from benchmarks.common.slow_network import slow_network
from benchmarks.common.tables import spread
from swarm import AutoDistributedModelForCausalLM, EarlyExit
from swarm.cli.local_swarm import LocalSwarm
from swarm.client.model.train_exits import ExitQuality
from swarm.client.routes.events import ExitTaken, ExitVerified
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.p2p import quiet_hivemind

DEMO_BLOCKS = 12
PROMPTS = (
    "Once upon a time, there was a king who",
    '"My dear Watson," said Holmes, "it is',
    "KING:\nMy lord, I",
    "My fellow citizens, we have",
)
"""In the manner of the demo model's texts: what leaves differs from text to text."""


@dataclass
class Exits:
    """What became of the tokens of some texts.

    Attributes:
        left, stood: by block in front of which they left: how many did, and how many of these stood.
    """

    left: dict[int, int] = field(default_factory=dict)
    stood: dict[int, int] = field(default_factory=dict)

    def __call__(self, event: Any) -> None:
        if isinstance(event, ExitTaken):
            self.left[event.block] = self.left.get(event.block, 0) + 1
        elif isinstance(event, ExitVerified) and event.stands:
            self.stood[event.block] = self.stood.get(event.block, 0) + 1

    def bound_s(self, tokens: int, boundaries: Sequence[int], delay: float, verified: bool) -> float:
        """The least time of so many tokens over links of this delay, if nothing else took any."""
        early = self.stood if verified else self.left
        saved = sum(count * (len(boundaries) - boundaries.index(block)) for block, count in early.items())
        return delay * (tokens * (len(boundaries) + 2) - saved)


@dataclass
class Row:
    """One way to generate, over one network.

    Attributes:
        seconds: of all texts together, by repetition.
        bounds: the least seconds, likewise.
        exits: of the newest repetition.
    """

    name: str
    options: EarlyExit | None
    seconds: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    exits: Exits = field(default_factory=Exits)


def measure(
    model: Any, local: Any, prompts: Sequence[torch.Tensor], rows: Sequence[Row], arguments: Any, delay: float
) -> None:
    """Fill in the rows, which take turns. Prompts are `[1, tokens]`."""
    expected = [local.generate(one, max_new_tokens=arguments.tokens + 1, do_sample=False) for one in prompts]
    boundaries = model.swarm.boundaries()
    for _ in range(arguments.repeats):
        for row in rows:
            row.exits = Exits()
            texts = [write(model, prompt_1T, row, arguments.tokens) for prompt_1T in prompts]
            verified = row.options is None or row.options.verify
            if verified and not all(text.equal(one) for (text, _), one in zip(texts, expected, strict=True)):
                raise SystemExit(f"{row.name}: the tokens differ from the local model's")
            written = sum(text.shape[1] - one.shape[1] - 1 for (text, _), one in zip(texts, prompts, strict=True))
            row.seconds.append(sum(seconds for _, seconds in texts))
            row.bounds.append(row.exits.bound_s(written, boundaries, delay, verified))


def write(model: Any, prompt_1T: torch.Tensor, row: Row, tokens: int) -> tuple[torch.Tensor, float]:
    """A text, and the seconds behind its first token."""
    with model.inference_session(max_length=2 * tokens + 64, listener=row.exits, early_exit=row.options):
        begun = model.generate(prompt_1T, max_new_tokens=1, do_sample=False)
        began = time.perf_counter()
        text = model.generate(begun, max_new_tokens=tokens, do_sample=False)
        return text, time.perf_counter() - began


@contextmanager
def network(servers: int, delay: float) -> Iterator[Any]:
    """Yield a client of the demo model; without a delay, of servers that share two cores with it."""
    spans = split_blocks(DEMO_BLOCKS, servers)
    if delay:
        with slow_network(DEMO_FOLDER, spans, delay) as model:
            yield model
        return
    with LocalSwarm(str(DEMO_FOLDER), spans, options=("--threads", "1", "--throughput", "1000")) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(DEMO_FOLDER, initial_peers=[swarm.address], wire="none")
        yield model
        model.swarm.close()


def rows(verified: Sequence[float], unverified: Sequence[float]) -> list[Row]:
    """Plain generation, verified exits by threshold, and exits that stand, by threshold."""
    return [
        Row("none", None),
        *(Row(f"softmax > {one:g}, verified", EarlyExit(threshold=one)) for one in verified),
        *(Row(f"softmax > {one:g}, unverified", EarlyExit(threshold=one, verify=False)) for one in unverified),
    ]


def table(found: Sequence[Row]) -> str:
    """Format the rows in Markdown."""
    lines = ["| exits | times plain | of the bound | left, in front of block: stood |", "| --- | --- | --- | --- |"]
    for row in found:
        ratios = [plain / seconds for plain, seconds in zip(found[0].seconds, row.seconds, strict=True)]
        near = [bound / seconds for bound, seconds in zip(row.bounds, row.seconds, strict=True)]
        left = ", ".join(
            f"{count} at {block}" + (f": {row.exits.stood.get(block, 0)}" if row.options and row.options.verify else "")
            for block, count in sorted(row.exits.left.items())
        )
        lines.append(f"| {row.name} | {spread(ratios)} | {spread(near) if any(near) else ''} | {left} |")
    return "\n".join(lines)


def lens_table(quality: Sequence[ExitQuality], seconds: float) -> str:
    """Format what lenses are worth in Markdown."""
    lines = [
        f"Lenses, trained in {seconds:.0f} s: share of held-out tokens whose successor is the full model's",
        "",
        "| in front of block | without a lens | with it |",
        "| --- | --- | --- |",
    ]
    return "\n".join([*lines, *(f"| {one.block} | {one.before:.0%} | {one.after:.0%} |" for one in quality)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="on which lenses are trained")
    parser.add_argument("--servers", default="3,4")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--thresholds", default="0,0.1,0.3", help="of exits that are verified")
    parser.add_argument("--unverified", default="0.3", help="thresholds of exits that stand")
    parser.add_argument("--tokens", type=int, default=48, help="of each of four texts")
    parser.add_argument("--train-tokens", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    print(", ".join(machine.describe().values()))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    local = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    share = arguments.train_tokens // len(arguments.text)
    texts = [torch.tensor(tokenizer(path.read_text())["input_ids"][:share]) for path in arguments.text]
    prompts = [torch.tensor([tokenizer(one)["input_ids"]]) for one in PROMPTS]
    results: dict[str, Any] = {}
    for servers in map(int, arguments.servers.split(",")):
        for delay in dict.fromkeys((arguments.delay, 0.0)):
            with network(servers, delay) as model:
                began = time.perf_counter()
                quality = model.train_exits(texts)
                trained_s = time.perf_counter() - began
                thresholds = [arguments.thresholds, arguments.unverified]
                found = rows(*([float(one) for one in some.split(",")] for some in thresholds))
                measure(model, local, prompts, found, arguments, delay)
            where = f"{servers} servers, {1e3 * delay:.0f} ms one way"
            print(f"\n{where}; median (range) of {arguments.repeats}\n\n{table(found)}", flush=True)
            if delay:
                print(f"\n{lens_table(quality, trained_s)}", flush=True)
            results[where] = {row.name: {"seconds": row.seconds, "exits": asdict(row.exits)} for row in found}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine.describe(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
