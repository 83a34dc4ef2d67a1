"""What a conversation costs whose turns begin with all that was said before, through a gateway with two keys.

    python -m benchmarks.wide_area.prefixes [--shape small] [--servers 4] [--delay 0.05] [--turns 6] [--tokens 4000]
        [--answer 16] [--strangers 20]

Each turn of a conversation brings new words, and all that was said before; at the last one, prompt and answer have
`--tokens` tokens. The time to the first token is compared with that of a conversation that has only the new words, and
with that of a gateway that keeps nothing (`--prefix-memory 0`). The three take turns.

Then another key asks what the first one has asked before, and what is new. It must find nothing in either case, and the
times must not differ (Mann-Whitney test).

The model has random weights, and each of its tokens is a word, so that answers come back as the tokens that they were.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.common.delayed import DelayedPeer, Network
from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.slow_network import slow_servers
from benchmarks.common.tables import spread
from swarm.cli.local_swarm import PeerProcess
from swarm.client import connection
from swarm.gateway.__main__ import main as serve
from swarm.gateway.api_keys import KeyLimits, add_key
from swarm.transport.p2p import quiet_hivemind

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}w0 {{ message.content }} w1 {% else %}{{ message.content }} {% endif %}"
    "{% endfor %}"
)

EXACT = ("--draft", "none", "--wire", "none")
"""Options of the gateways. In 8 bits, what was computed in other steps may round differently."""


@dataclass(frozen=True)
class Answer:
    """One answer of a gateway."""

    text: str
    first_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Chat:
    """A gateway as one key sees it."""

    url: str
    key: str
    model: str

    def ask(self, messages: Sequence[dict[str, str]], tokens: int) -> Answer:
        """The answer to a conversation."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer {self.key}"}
        began, first = time.perf_counter(), 0.0
        texts: list[str] = []
        usage: dict[str, Any] = {}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=600) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise SystemExit(event["error"])
                for choice in event["choices"]:
                    if content := choice["delta"].get("content"):
                        first = first or time.perf_counter() - began
                        texts.append(content)
                usage = event.get("usage") or usage
        return Answer("".join(texts), first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def words(count: int, source: random.Random, vocabulary: int) -> str:
    """A text of so many tokens."""
    return " ".join(f"w{source.randrange(2, vocabulary)}" for _ in range(count))


def conversation(chat: Chat, turns: int, new: int, answer: int, source: random.Random, vocabulary: int) -> list[Answer]:
    """The answers of a conversation to which each turn adds so many tokens, of which some are its answer."""
    messages: list[dict[str, str]] = []
    answers = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(new - answer - 2, source, vocabulary)})
        answers.append(chat.ask(messages, answer))
        messages.append({"role": "assistant", "content": answers[-1].text.strip()})
    return answers


def same_distribution(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability of a difference like this between samples of the same distribution (Mann-Whitney U test)."""
    wins = sum((one > other) + 0.5 * (one == other) for one in first for other in second)
    count = len(first) * len(second)
    deviation = (count * (len(first) + len(second) + 1) / 12) ** 0.5
    distance = abs(wins - count / 2) / deviation
    return 2 * (1 - statistics.NormalDist().cdf(distance))


def add_tokenizer(path: Path, vocabulary: int) -> None:
    """Give the model a tokenizer of words."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


@contextmanager
def gateway(path: Path, address: str, delay: float, keys: Path, *options: str) -> Iterator[str]:
    """Run a gateway on the slow network; yields its URL."""
    where = (str(path), "--initial-peers", address, "--port", "0", "--keys", str(keys), *EXACT, *options)
    process = PeerProcess(("benchmarks.wide_area.prefixes", "--gateway", str(delay), *where), {"OMP_NUM_THREADS": "1"})
    try:
        yield process.wait_for(r"^Gateway: (\S+)/$")[1]
    finally:
        process.stop()


def run_gateway(delay: str, *arguments: str) -> None:
    """The process of a gateway on the slow network."""
    DelayedPeer.network = Network.read(str(float(delay)))
    connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    serve(list(arguments))


def measure(report: Report, own: Chat, plain: Chat, turns: int, new: int, answer: int, vocabulary: int) -> None:
    """Measure conversations, such that have only the new words of each turn, and those of a gateway without memory."""
    source = random.Random(0)
    for chat in (own, plain):  # warms up
        conversation(chat, 1, new, answer, source, vocabulary)
    for number in report.rounds():
        kept = conversation(own, turns, new, answer, random.Random(1 + number), vocabulary)
        fresh = [conversation(own, 1, new, answer, source, vocabulary)[0] for _ in range(turns)]
        without = conversation(plain, turns, new, answer, random.Random(1 + number), vocabulary)
        if [one.text for one in kept] != [one.text for one in without]:
            report.note("a text differs from that of the gateway that keeps nothing")
        for turn, (mine, alone, whole) in enumerate(zip(kept, fresh, without, strict=True), 1):
            where = f"turn {turn}"
            report.add("tokens of the prompt", mine.prompt_tokens, where=where)
            report.add("of these cached", mine.cached_tokens, "more", where=where)
            report.add("first token, s", mine.first_s, "less", where=where)
            report.add("times new tokens alone", mine.first_s / alone.first_s, "less", decides=True, where=where)
            report.add("nothing kept, times that", whole.first_s / mine.first_s, "more", decides=True, where=where)


def measure_strangers(report: Report, own: Chat, other: Chat, count: int, new: int, answer: int, size: int) -> None:
    """Compare how long another key waits for what the first one has asked, and for what is new."""
    asked: list[Answer] = []
    unasked: list[Answer] = []
    for number in range(count):
        secret, unknown = random.Random(1000 + number), random.Random(2000 + number)
        conversation(own, 1, new, answer, random.Random(1000 + number), size)
        both = [(asked, secret), (unasked, unknown)]
        for answers, text in both if number % 2 else both[::-1]:
            answers += conversation(other, 1, new, answer, text, size)
    found = sum(one.cached_tokens for one in (*asked, *unasked))
    chance = same_distribution([one.first_s for one in asked], [one.first_s for one in unasked])
    report.note(
        f"With another key, {count} prompts that were asked before took {spread([one.first_s for one in asked])} s, "
        f"others {spread([one.first_s for one in unasked])} s; p = {chance:.2f}; {found} tokens were found."
    )


def main() -> None:
    if sys.argv[1:2] == ["--gateway"]:
        return run_gateway(*sys.argv[2:])
    parser = report_parser(__doc__, repeats=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds one way between any two machines")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--strangers", type=int, default=20)
    arguments = parser.parse_args()
    quiet_hivemind()
    vocabulary = SHAPES[arguments.shape].vocab_size
    new, answer = arguments.tokens // arguments.turns, arguments.answer
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(arguments.shape, Path(folder))
        add_tokenizer(path, vocabulary)
        spans = split_blocks(SHAPES[arguments.shape].num_hidden_layers, arguments.servers)
        keys = Path(folder) / "keys.yaml"
        secrets = [add_key(keys, name, KeyLimits()) for name in ("own", "other")]
        with (
            slow_servers(path, spans, arguments.delay, throughput="auto") as address,
            gateway(path, address, arguments.delay, keys) as url,
            gateway(path, address, arguments.delay, keys, "--prefix-memory", "0") as plain_url,
            Report(arguments) as report,
        ):
            own, other = (Chat(url, secret, path.name) for secret in secrets)
            plain = Chat(plain_url, secrets[0], path.name)
            measure(report, own, plain, arguments.turns, new, answer, vocabulary)
            if arguments.strangers:
                measure_strangers(report, own, other, arguments.strangers, new, answer, vocabulary)


if __name__ == "__main__":
    main()
