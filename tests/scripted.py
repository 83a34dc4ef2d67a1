"""Checkpoints that answer with known texts, for tests of what people see of a model.

A real Llama of six blocks. The output projections of its blocks are zero, so hidden states leave all blocks as they
are; embeddings are unit vectors, one a token; row j of the head looks at the token before j. So every token has one
successor, and whatever is sampled says the same. Every token of a script stands at one place of one script only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BLOCKS = 6
CONTEXT = 8192
END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
PIECE = 4
"""Bytes of a token of a script, at least. A token may end in the middle of a character."""

CERTAIN = 500.0
"""Logit of the right successor; all others have 0."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') | trim }}{% endfor %}"
)
"""Ends with the last message: its last word decides what comes next."""


def make_scripted(
    folder: Path, scripts: Mapping[str, str], chat_template: str | None = None, context: int = CONTEXT
) -> Path:
    """Write the checkpoint of a model that says `scripts[word]`, then ends, after a prompt that ends with `word`.

    What `scripts[""]` says follows after any other prompt; without it, nothing does. In prompts a token is a byte, or
    one of the words. A script has at least two bytes, and is no such word.

    Args:
        chat_template: instead of the usual one. What it makes has to end with the last message.
        context: tokens that the model reads at once.
    """
    vocabulary = {character: number for number, character in enumerate(sorted(_byte_characters().values()))}
    specials = [END, *(f"<|{role}|>" for role in ROLES)]
    words = [word for word in scripts if word]
    chains = {text: _cut(text, vocabulary, reserved={*specials, *words}) for text in dict.fromkeys(scripts.values())}
    tokenizer = _tokenizer(vocabulary, specials, words, chat_template, context)
    successors = _successors(tokenizer, scripts, chains)
    tokenizer.save_pretrained(folder)
    _model(successors, tokenizer.eos_token_id, context).save_pretrained(folder)
    return folder


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (as GPT-2 has it)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = itertools.count(256)
    return {byte: chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)}


def _cut(text: str, vocabulary: dict[str, int], reserved: set[str]) -> list[int]:
    """Cut the text into tokens that nothing else uses, and add these to the vocabulary."""
    characters = _byte_characters()
    written = "".join(characters[byte] for byte in text.encode())
    pieces: list[str] = []
    taken = {*vocabulary, *reserved}
    start, end = 0, PIECE
    while start < len(written):
        if end > len(written):  # what is left is too short, or in use: it joins the piece before
            if not pieces:
                break
            start -= len(pieces[-1])
            taken.remove(pieces.pop())
            end = len(written)
        piece = written[start:end]
        if piece not in taken:
            pieces.append(piece)
            taken.add(piece)
            start, end = end, end + PIECE
        else:
            end += 1
    if not pieces and written not in taken:
        pieces = [written]
    if not pieces:
        raise ValueError(f"the script {text!r} cannot be cut into tokens of its own; make it longer or another one")
    for piece in pieces:
        vocabulary[piece] = len(vocabulary)
    return [vocabulary[piece] for piece in pieces]


def _tokenizer(
    vocabulary: dict[str, int], specials: list[str], words: list[str], chat_template: str | None, context: int
) -> PreTrainedTokenizerFast:
    """Byte-level, without merges: no prompt holds a script's token."""
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    backend.add_tokens(words)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE if chat_template is None else chat_template,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _successors(
    tokenizer: PreTrainedTokenizerFast, scripts: Mapping[str, str], chains: Mapping[str, list[int]]
) -> list[int]:
    """The token that follows each token."""
    end = tokenizer.eos_token_id
    successors = [chains[scripts[""]][0] if "" in scripts else end] * len(tokenizer)
    for chain in chains.values():
        for token, following in itertools.pairwise([*chain, end]):
            successors[token] = following
    for word, text in scripts.items():
        if word:
            successors[tokenizer.convert_tokens_to_ids(word)] = chains[text][0]
    return successors


def _model(successors: list[int], end: int, context: int) -> LlamaForCausalLM:
    tokens = len(successors)
    hidden = -(-tokens // 64) * 64
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=hidden,
        intermediate_size=16,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(tokens, hidden))
        head_VH = torch.zeros(tokens, hidden)
        head_VH[torch.tensor(successors), torch.arange(tokens)] = CERTAIN / hidden**0.5  # the norm brings hidden**0.5
        model.get_output_embeddings().weight.copy_(head_VH)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model
