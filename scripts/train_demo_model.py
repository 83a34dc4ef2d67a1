"""Trains a small model from any text files, on a CPU: the demo model that ships with swarm, and models for benchmarks.

    python -m scripts.train_demo_model texts/*.txt --minutes 60
    python -m scripts.train_demo_model texts/*.txt --minutes 30 --family opt --out runs/opt --work runs/opt-work
    python -m scripts.train_demo_model texts/*.txt --minutes 30 --family llama --activation relu --out ... --work ...
    python -m scripts.train_demo_model texts/*.txt --minutes 40 --start-from MODEL --exits 0.5

The texts are cleaned and split into a training part and a held-out end. A byte-level BPE tokenizer and a model of a few
million parameters are trained on the former, and the weights with the best held-out loss are exported in the layout
that `from_pretrained` reads. `--resume` goes on from the last checkpoint; with its time used up it only exports.

Models whose activation yields exact zeros (OPT's ReLU, nemotron's squared ReLU, or another with `--activation`) are
those that `benchmarks.flash.quality` measures; their feed-forward layers are wider than the demo model's.

`--exits` gives a share of the loss to exits behind the blocks (`exit_loss.py`), so that tokens can leave early.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from scripts.exit_loss import exit_agreement, exit_loss, exit_weights, left_out

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
CONTEXT, LONG_CONTEXT = 256, 1024
LONG_EVERY = 8  # One step in eight is of long chunks: every rope position is trained, at little cost.
TOKENS_PER_STEP = 8 * CONTEXT
WARMUP_STEPS = 100
HELD_OUT = 0.02
MEASURED = "<!-- measured by scripts/train_demo_model.py -->"
QUOTES = dict.fromkeys("\u201c\u201d", '"') | dict.fromkeys("\u2018\u2019", "'")
TYPOGRAPHY = str.maketrans({**QUOTES, "\u2014": "--", "\u00a0": " ", "_": ""})

DEMO_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_WIDE = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8}
WIDE_SHAPES: dict[str, dict[str, Any]] = {
    "opt": {**_WIDE, "ffn_dim": 1024, "word_embed_proj_dim": 256, "dropout": 0.0},
    "nemotron": {**_WIDE, "intermediate_size": 1024, "num_key_value_heads": 4},
    "llama": {**_WIDE, "intermediate_size": 704, "num_key_value_heads": 4},
}
"""For benchmarks: the families that `--family` knows."""

Options = argparse.Namespace


@dataclass
class Text:
    """One source file as token ids; `weight` multiplies its share of the training chunks."""

    name: str
    weight: float
    train: Tensor
    held_out: Tensor
    held_out_bytes: int


# Data


def clean(text: str) -> str:
    """The text without Gutenberg's frame, typographic characters and hard line ends; long gaps end a document."""
    framed = re.search(r"\*\*\* ?START OF.*?\*\*\*(.*?)\*\*\* ?END OF", text, re.DOTALL)
    text = (framed.group(1) if framed else text).translate(TYPOGRAPHY)
    text = re.sub(r"\[Illustration.*?\]|[\x80-\x9f]", "", text, flags=re.DOTALL)
    if max(map(len, text.split("\n"))) <= 80:  # Wrapped prose: a full line goes on in the next one; verse is shorter.
        text = re.sub(r"(?m)^(.{58,})\n(?=\S)", r"\1 ", text)
    text = re.sub(r"\n(?:[ \t]*\n){4,}", END_OF_TEXT, text.strip())
    return re.sub(r"\n(?:[ \t]*\n)+", "\n\n", text) + "\n"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    bpe.train_from_iterator((document for text in texts for document in text.split(END_OF_TEXT)), trainer)
    return bpe


def load_texts(
    paths: list[Path], weights: dict[str, float], bpe: Tokenizer | None = None
) -> tuple[Tokenizer, list[Text]]:
    """Read the texts; with no tokenizer given, one is trained on their training parts."""
    cleaned = {path.stem: clean(path.read_text("utf-8-sig")) for path in paths}
    cuts = {name: text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1 for name, text in cleaned.items()}
    bpe = bpe or train_tokenizer([text[: cuts[name]] for name, text in cleaned.items()])
    texts = []
    for name, text in cleaned.items():
        train, held_out = (torch.tensor(bpe.encode(part).ids) for part in (text[: cuts[name]], text[cuts[name] :]))
        if len(train) <= LONG_CONTEXT:
            raise SystemExit(f"{name} has only {len(train)} tokens to train on; it needs more than {LONG_CONTEXT}")
        texts.append(Text(name, weights.get(name, 1.0), train, held_out, len(text[cuts[name] :].encode())))
    return bpe, texts


def draw_batch(texts: list[Text], step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets: chunks at random offsets, drawn from seed and step alone, so that a resumed run agrees."""
    length = LONG_CONTEXT if step % LONG_EVERY == LONG_EVERY - 1 else CONTEXT
    draw = random.Random(seed * 1_000_003 + step)
    shares = [text.weight * len(text.train) for text in texts]
    sources = [text.train for text in draw.choices(texts, shares, k=TOKENS_PER_STEP // length)]
    starts = [draw.randrange(len(ids) - length) for ids in sources]
    batch = torch.stack([ids[start : start + length + 1] for ids, start in zip(sources, starts, strict=True)])
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


# Training


def mean_loss(model: PreTrainedModel, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def held_out_nats(model: PreTrainedModel, text: Text, length: int) -> float:
    """The summed loss of every held-out token but the first, each predicted from the chunk it lies in."""
    ids, nats = text.held_out[None], 0.0
    for start in range(0, ids.shape[1] - 1, length):
        targets = ids[:, start + 1 : start + length + 1]
        nats += mean_loss(model, ids[:, start : start + targets.shape[1]], targets).item() * targets.numel()
    return nats


def held_out_loss(model: PreTrainedModel, texts: list[Text], length: int = CONTEXT) -> tuple[float, float]:
    """Nats per token and bits per byte."""
    nats = sum(held_out_nats(model, text, length) for text in texts)
    tokens, size = sum(len(text.held_out) - 1 for text in texts), sum(text.held_out_bytes for text in texts)
    return nats / tokens, nats / math.log(2) / size


def build_model(family: str, activation: str | None, end_of_text: int) -> PreTrainedModel:
    """A new model.

    Args:
        activation: in place of the family's own, by transformers' name.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(family, activation, end_of_text))
    return model


def config_of(family: str, activation: str | None, end_of_text: int) -> PreTrainedConfig:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text)
    shape = DEMO_SHAPE if family == "llama" and activation is None else WIDE_SHAPES[family]
    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONG_CONTEXT,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **special,
        **shape,
    }
    if activation is not None:
        default = AutoConfig.for_model(family)
        name = next(key for key in ("activation_function", "hidden_act") if hasattr(default, key))
        common[name] = activation
    return AutoConfig.for_model(family, **common)


def learning_rate(step: int, done: float, peak: float) -> float:
    """Linear warm-up by steps under a cosine to 2 % of the peak; `done` is the spent share of the run, from 0 to 1."""
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (0.51 + 0.49 * math.cos(math.pi * done))


class Training:
    """A run: the model, its optimizer, and how far they have come."""

    def __init__(self, model: PreTrainedModel, texts: list[Text], options: Options) -> None:
        self.model, self.texts, self.options = model, texts, options
        decayed = {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1}
        gains = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW([decayed, gains], betas=(0.9, 0.95), fused=True)
        self.step, self.seconds = 0, 0.0
        self.curve: list[tuple[int, float, float]] = []  # step, mean training loss since the last point, held-out loss
        self.best = model.state_dict()

    def run(self) -> None:
        """Trains until the minutes or the steps are spent; leaves the best held-out weights in the model."""
        loss = torch.compile(exit_loss, dynamic=False) if self.options.compile else exit_loss
        recent, started = [], time.monotonic() - self.seconds
        with tqdm(total=self.options.steps, initial=self.step, unit="step") as bar:
            while self.share_done() < 1:
                recent.append(self.take_step(loss))
                self.step, self.seconds = self.step + 1, time.monotonic() - started
                bar.update()
                if self.step % self.options.evaluate_every == 0 or self.share_done() >= 1:
                    held_out, _ = held_out_loss(self.model, self.texts)
                    self.curve.append((self.step, sum(recent) / len(recent), held_out))
                    bar.set_postfix(train=self.curve[-1][1], held_out=held_out, done=f"{self.share_done():.0%}")
                    recent = []
                    self.keep()
        self.model.load_state_dict(self.best)

    def share_done(self) -> float:
        by_steps = self.step / self.options.steps if self.options.steps else 0.0
        return float(max(by_steps, self.seconds / (60 * self.options.minutes)))

    def take_step(self, loss: Callable[..., Tensor]) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.share_done(), self.options.learning_rate)
        # Weights, gradients and the optimizer's state stay float32; only the products are taken in bfloat16.
        weights = exit_weights(self.step, self.model.config.num_hidden_layers, self.options.exits)
        with torch.autocast("cpu", torch.bfloat16), left_out(self.model, self.options.layer_dropout):
            value = loss(self.model, *draw_batch(self.texts, self.step, self.options.seed), weights)
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.item()

    def keep(self) -> None:
        """Writes a checkpoint, with the best weights so far beside the present ones."""
        if self.curve[-1][2] <= min(held_out for _, _, held_out in self.curve):
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        state = {name: getattr(self, name) for name in ("step", "seconds", "curve", "best")}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.options.work.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.options.work / "checkpoint.tmp")
        os.replace(self.options.work / "checkpoint.tmp", self.options.work / "checkpoint.pt")

    def resume(self) -> None:
        state = torch.load(self.options.work / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state.pop("model"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        vars(self).update(state)


# Export


def export(training: Training, bpe: Tokenizer, out: Path) -> None:
    """Writes all files beside their place, then moves each in, so that a reader never meets half a file."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        save_model(training.model, bpe, folder)
        plot_curve(training.curve, folder / "loss_curve.png")
        # What was written is measured, so that the card speaks of the rounded weights.
        measured = measurements(AutoModelForCausalLM.from_pretrained(folder), bpe, training)
        (folder / "README.md").write_text(update_card(out / "README.md", measured), "utf-8")
        for path in folder.iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def save_model(model: PreTrainedModel, bpe: Tokenizer, folder: Path) -> None:
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=bpe, model_max_length=LONG_CONTEXT, **special).save_pretrained(folder)
    model.config.save_pretrained(folder)
    GenerationConfig.from_model_config(model.config).save_pretrained(folder)
    # The head shares the embedding's tensor, which the file holds once.
    weights = {name: value.bfloat16() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def plot_curve(curve: list[tuple[int, float, float]], path: Path) -> None:
    steps, train_losses, held_out_losses = zip(*curve, strict=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, train_losses, label="training (mean since the last point)")
    axes.plot(steps, held_out_losses, label="held out")
    axes.set(xlabel="step", ylabel="loss, nats per token", title="training and held-out loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def update_card(path: Path, measured: str) -> str:
    """The model card with what stands between its two markers replaced; a new card is that part alone."""
    card = path.read_text("utf-8") if path.exists() else f"{MEASURED}{MEASURED}\n"
    before, _, after = card.split(MEASURED)
    return f"{before}{MEASURED}\n\n{measured}\n\n{MEASURED}{after}"


def measurements(model: Any, bpe: Tokenizer, training: Training) -> str:
    texts, seen = training.texts, training.step * TOKENS_PER_STEP
    scores = {text.name: held_out_loss(model, [text]) for text in texts}
    scores |= {f"all, windows of {size} tokens": held_out_loss(model, texts, size) for size in (CONTEXT, LONG_CONTEXT)}
    rows = "\n".join(f"| {name} | {math.exp(nats):.2f} | {bits:.3f} |" for name, (nats, bits) in scores.items())
    exits = ""
    if training.options.exits:
        windows = [text.held_out[: len(text.held_out) // CONTEXT * CONTEXT].view(-1, CONTEXT) for text in texts]
        shares = exit_agreement(model, torch.cat(windows))
        exits = "\n\n| blocks passed | successors that are the full model's |\n| --- | --- |\n"
        exits += "\n".join(f"| {passed} | {share:.0%} |" for passed, share in shares.items())
    torch.manual_seed(0)
    prompt = torch.tensor([bpe.encode("Once upon a time").ids])
    sampled = model.generate(prompt, max_new_tokens=200, do_sample=True, temperature=0.8, top_k=40)
    sample = bpe.decode(sampled[0].tolist()).strip().replace("\n", "\n> ")
    return f"""- parameters: {sum(p.numel() for p in model.parameters()):,}
- training: {training.step:,} steps of {TOKENS_PER_STEP:,} tokens, {seen / 1e6:.1f} million in all
- wall time: {training.seconds / 60:.0f} minutes with {training.options.threads} threads

| held-out text | perplexity per token | bits per byte |
| --- | --- | --- |
{rows}{exits}

A sample at temperature 0.8 and top-k 40:

> {sample}"""


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="UTF-8 text files")
    parser.add_argument("--weight", nargs="+", default=[], metavar="NAME=FACTOR", help="multiplies a text's share")
    parser.add_argument("--family", choices=sorted(WIDE_SHAPES), default="llama")
    parser.add_argument("--activation", help="in place of the family's own, such as relu for llama")
    parser.add_argument("--start-from", type=Path, help="a model that was trained here, in place of a new one")
    parser.add_argument("--exits", type=float, default=0.0, help="share of the loss that is that of exits, 0 to 1")
    parser.add_argument("--layer-dropout", type=float, default=0.0, help="rate at which the last block is left out")
    parser.add_argument("--out", type=Path, default=Path("swarm/models/demo"))
    parser.add_argument("--work", type=Path, default=Path("runs/demo"), help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=60, help="the learning rate's schedule ends with them")
    parser.add_argument("--steps", type=int, help="an end in steps, if it comes before the minutes'")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--evaluate-every", type=int, default=300, help="steps between held-out losses and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="faster steps after a minute or two of compiling")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    weights = {name: float(factor) for name, factor in (pair.split("=") for pair in options.weight)}
    bpe = Tokenizer.from_file(str(options.start_from / "tokenizer.json")) if options.start_from else None
    bpe, texts = load_texts(options.texts, weights, bpe)
    if options.start_from:
        model = AutoModelForCausalLM.from_pretrained(options.start_from, dtype=torch.float32)
    else:
        model = build_model(options.family, options.activation, bpe.get_vocab()[END_OF_TEXT])
    training = Training(model, texts, options)
    if options.resume:
        training.resume()
    training.run()
    export(training, bpe, options.out)


if __name__ == "__main__":
    main()
