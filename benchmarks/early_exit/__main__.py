"""Early exit between servers: tokens a second against plain generation, and how near that is to what exits allow.

    python -m benchmarks.early_exit --text texts/*.txt [--servers 3,4] [--delay 0.05] [--thresholds 0,0.1,0.3]
        [--unverified 0.3] [--tokens 48]

The demo model over real libp2p processes whose streams deliver everything with a delay (`benchmarks.common.delayed`),
and once without delay. Lenses are trained over the same swarm on the first texts, `--train-tokens` of them. Plain
generation and all thresholds take turns; texts that are verified are compared with the local model's, token for token.

The bound follows from what happened to each token: with a delay of d, a token that leaves behind the k-th of N servers
and stands costs (k + 1) d; one that stays to the end, or does not stand, (N + 1) d, as every token does without exits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import split_blocks
from benchmarks.common.slow_network import slow_network
from benchmarks.common.tables import table
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


def measure(
    report: Report,
    where: str,
    model: Any,
    expected: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ways: dict[str, EarlyExit | None],
    tokens: int,
    delay: float,
) -> None:
    """Measure all ways to generate, which take turns.

    Args:
        expected: prompts `[1, T]`, and the local model's texts that begin with them.
    """
    boundaries = model.swarm.boundaries()
    for _ in report.rounds(where):
        plain_s = 0.0
        for name, options in ways.items():
            exits, seconds, written = Exits(), 0.0, 0
            verified = options is None or options.verify
            for prompt_1T, whole_1T in expected:
                text_1T, took = write(model, prompt_1T, options, exits, tokens)
                if verified and not text_1T.equal(whole_1T):
                    raise SystemExit(f"{name}: the tokens differ from the local model's")
                written += text_1T.shape[1] - prompt_1T.shape[1] - 1
                seconds += took
            plain_s = plain_s or seconds
            row = f"{where}, exits: {name}"
            report.add("times plain", plain_s / seconds, "more", decides=options is not None, where=row)
            if delay:
                bound_s = exits.bound_s(written, boundaries, delay, verified)
                report.add("of the bound", bound_s / seconds, "more", where=row)
            for block in boundaries if options is not None else ():
                report.add(f"left at {block}", exits.left.get(block, 0), where=row)
                if verified:
                    report.add(f"stood at {block}", exits.stood.get(block, 0), where=row)


def write(
    model: Any, prompt_1T: torch.Tensor, options: EarlyExit | None, exits: Exits, tokens: int
) -> tuple[torch.Tensor, float]:
    """A text, and the seconds behind its first token."""
    with model.inference_session(max_length=2 * tokens + 64, listener=exits, early_exit=options):
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


def ways(verified: Sequence[float], unverified: Sequence[float]) -> dict[str, EarlyExit | None]:
    """Plain generation, verified exits by threshold, and exits that stand, by threshold."""
    found: dict[str, EarlyExit | None] = {"none": None}
    found |= {f"softmax > {one:g}, verified": EarlyExit(threshold=one) for one in verified}
    found |= {f"softmax > {one:g}, unverified": EarlyExit(threshold=one, verify=False) for one in unverified}
    return found


def lens_table(quality: Sequence[ExitQuality], seconds: float) -> str:
    """Format what lenses are worth in Markdown."""
    rows = [(f"{one.block}", f"{one.before:.0%}", f"{one.after:.0%}") for one in quality]
    about = f"Lenses, trained in {seconds:.0f} s: share of held-out tokens whose successor is the full model's"
    return f"{about}\n\n{table(('in front of block', 'without a lens', 'with it'), rows)}\n"


def main() -> None:
    parser = report_parser(__doc__, repeats=3)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="on which lenses are trained")
    parser.add_argument("--servers", default="3,4")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--thresholds", default="0,0.1,0.3", help="of exits that are verified")
    parser.add_argument("--unverified", default="0.3", help="thresholds of exits that stand")
    parser.add_argument("--tokens", type=int, default=48, help="of each of four texts")
    parser.add_argument("--train-tokens", type=int, default=40_000)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    local = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    share = arguments.train_tokens // len(arguments.text)
    texts = [torch.tensor(tokenizer(path.read_text())["input_ids"][:share]) for path in arguments.text]
    prompts = [torch.tensor([tokenizer(one)["input_ids"]]) for one in PROMPTS]
    settings: dict[str, Any] = {"max_new_tokens": arguments.tokens + 1, "do_sample": False}
    expected = [(one, local.generate(one, **settings)) for one in prompts]
    chosen = ways(*([float(one) for one in some.split(",")] for some in (arguments.thresholds, arguments.unverified)))
    with Report(arguments) as report:
        for servers in map(int, arguments.servers.split(",")):
            for delay in dict.fromkeys((arguments.delay, 0.0)):
                where = f"{servers} servers, {1e3 * delay:.0f} ms one way"
                with network(servers, delay) as model:
                    began = time.perf_counter()
                    quality = model.train_exits(texts)
                    if delay:
                        report.note(f"{where}. {lens_table(quality, time.perf_counter() - began)}")
                    measure(report, where, model, expected, chosen, arguments.tokens, delay)


if __name__ == "__main__":
    main()
