"""What each draft is worth on three kinds of text, over servers that are far apart.

    python -m benchmarks.wide_area.drafts --text TEXTS [--model FOLDER] [--own] [--tokens 96]

A draft head is trained over the swarm, and a small model here, both on the texts or, with --own, on texts that the
model writes. Prompts come from the texts' end, which neither has seen. "Novel" continues them, sampled; "list" goes on
with a numbered list, greedily; "quote" has a passage and the first words of the same passage again, greedily. With all
drafts together, each guess is chosen by what earlier ones were worth. A text is the same with every draft.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import split_blocks
from benchmarks.common.slow_network import slow_network
from swarm.client.routes.events import GuessVerified
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from swarm.transport.p2p import quiet_hivemind

WINDOW = 256
HELD_OUT_SHARE = 0.02
PROMPT_TOKENS = 64
TEMPERATURE = 0.8
LIST = "".join(f"{number}. The {name}.\n" for number, name in enumerate(("king", "queen", "cat", "dog", "bear"), 1))
SMALL_WIDTH, SMALL_LAYERS = 128, 2


def own_texts(local: Any, tokens: int) -> torch.Tensor:
    """What the model writes when nothing is in front, `[R, WINDOW]`."""
    torch.manual_seed(0)
    start, rows = torch.full((64, 1), local.config.bos_token_id or 0), list[torch.Tensor]()
    while len(rows) * len(start) * WINDOW < tokens:
        settings = {"min_new_tokens": WINDOW, "max_new_tokens": WINDOW, "top_k": 0, "pad_token_id": 0}
        rows.append(local.generate(start, attention_mask=torch.ones_like(start), do_sample=True, **settings)[:, 1:])
    return torch.cat(rows)


def file_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int) -> torch.Tensor:
    """As much of each of the texts as of the others, `[R, WINDOW]`."""
    rows = []
    for text in texts:
        start = text[: int(len(text) * (1 - HELD_OUT_SHARE))][: 12 * tokens // len(texts)]
        ids = torch.tensor(tokenizer(start, verbose=False)["input_ids"][: tokens // len(texts)])
        rows.append(ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW))
    return torch.cat(rows)


def small_model(local: Any, rows: torch.Tensor, passes: int) -> Any:
    """A model of the same tokens with two layers, taught by the model what comes next."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=local.config.vocab_size,
        hidden_size=SMALL_WIDTH,
        intermediate_size=3 * SMALL_WIDTH,
        num_hidden_layers=SMALL_LAYERS,
        num_attention_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    small: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(small.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=passes * (len(rows) // 8) + 1)
    for _ in range(passes):
        for batch in rows[torch.randperm(len(rows))].split(8):
            if len(batch) < 8:
                continue
            with torch.no_grad():
                goal = local(batch).logits.softmax(-1)
            loss = torch.nn.functional.cross_entropy(small(batch).logits.flatten(0, 1), goal.flatten(0, 1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return small.eval().requires_grad_(False)


def prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], repeats: int) -> dict[str, list[torch.Tensor]]:
    """By kind of text, prompts `[1, T]`."""

    def ids(text: str, most: int | None = None) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :most]

    ends = [texts[n % len(texts)][-int(len(texts[n % len(texts)]) * HELD_OUT_SHARE) :] for n in range(repeats)]
    passages = [end[1000 * n : 1000 * n + 400] for n, end in enumerate(ends)]
    return {
        "novel": [ids(passage, PROMPT_TOKENS) for passage in passages],
        "list": [ids(passage[:80] + "\n\n" + LIST * 2) for passage in passages],
        "quote": [ids(passage + "\n\n" + passage[:60]) for passage in passages],
    }


class Guesses(Counter[bool]):
    """Counts the guesses of a session: those that stood, and the others."""

    def __call__(self, event: Any) -> None:
        """Count an event."""
        if isinstance(event, GuessVerified):
            self[event.stands] += 1


def measure(
    report: Report, model: Any, kind: str, found: Sequence[torch.Tensor], drafts: dict[str, Any], tokens: int
) -> None:
    """Measure all drafts for one kind of text, with the next prompt in each round."""
    settings: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    settings |= {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0} if kind == "novel" else {}
    for number in report.rounds(kind):
        prompt_1T = found[number % len(found)]
        rates, texts = dict[str, float](), []
        for name, draft in drafts.items():
            guesses = Guesses()
            with model.inference_session(max_length=prompt_1T.shape[1] + tokens, listener=guesses):
                model.generate(prompt_1T, max_new_tokens=1, do_sample=False)
                torch.manual_seed(number)
                began = time.perf_counter()
                texts.append(model.generate(prompt_1T, draft=draft, **settings))
                rates[name] = tokens / (time.perf_counter() - began)
            where = f"{kind}, {name}"
            report.add("tokens/s", rates[name], "more", where=where)
            if draft is not None:
                report.add("times plain", rates[name] / rates["none"], "more", decides=True, where=where)
                report.add("guesses that stood", guesses[True] / max(1, guesses.total()), "more", where=where)
        if any(not one.equal(texts[0]) for one in texts):
            raise SystemExit(f"the texts of kind {kind} differ between drafts")
        single = max(rate for name, rate in rates.items() if name != "all")
        report.add("all drafts against the round's best", rates["all"] / single, "more")


def main() -> None:
    parser = report_parser(__doc__, repeats=3)
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--own", action="store_true", help="train on what the model writes, not on the texts")
    parser.add_argument("--train-tokens", type=int, default=160_000)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--draft-head", type=Path, help="where to write the draft head, or where it is already")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds one way between any two machines")
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet_hivemind()
    tokenizer, local = load_tokenizer(arguments.model), load_local_model(arguments.model).requires_grad_(False)
    texts = [path.read_text() for path in arguments.text]
    train, passes = arguments.train_tokens, arguments.passes
    rows = own_texts(local, train) if arguments.own else file_texts(tokenizer, texts, train)
    began = time.perf_counter()
    small = small_model(local, rows, passes)
    print(f"the small model: {time.perf_counter() - began:.0f} s for {rows.numel()} tokens, {passes} times", flush=True)
    spans = split_blocks(local.config.num_hidden_layers, arguments.servers)
    with slow_network(arguments.model, spans, arguments.delay) as model:
        if arguments.draft_head is not None and arguments.draft_head.exists():
            model.load_draft(arguments.draft_head)
        else:
            began = time.perf_counter()
            quality = model.train_draft([rows], passes=passes)
            print(f"the draft head: {time.perf_counter() - began:.0f} s")
            for name, shares in (("before", quality.before), ("after", quality.after)):
                print(f"  right {name}, guess by guess: " + ", ".join(f"{share:.3f}" for share in shares), flush=True)
            if arguments.draft_head is not None:
                model.save_draft(arguments.draft_head)
        drafts = {"none": None, "copies": "copies", "small model": small, "head": "head"}
        drafts["all"] = ["copies", "head", small]
        with Report(arguments) as report:
            for kind, found in prompts(tokenizer, texts, arguments.repeats).items():
                measure(report, model, kind, found, drafts, arguments.tokens)


if __name__ == "__main__":
    main()
