"""Loading a checkpoint's tokenizer, if it turns every token into a short text. Imports no torch.

Tokens are decoded in the process that computes them, one by one, so their texts have to be bounded beforehand. (Texts
become tokens in a process that can be ended, see `prompt_process`.) A decoder is a list of steps, and those that
replace a text by a longer one could double it over and over; a regular expression could take forever to match.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

from swarm.common.files.gguf_header import SUFFIX, gguf_in, read_header, split_files
from swarm.errors import CheckpointError

MAX_TOKEN_CHARACTERS = 4096
"""Of one entry of the vocabulary. Long runs of spaces have hundreds."""

MAX_DECODER_STEPS = 32

MAX_DECODER_GROWTH = 64
"""How many times longer all steps of a decoder may make a text. One that is not made for it makes it shorter."""


def tokenizer_problem(tokenizer: Any) -> str:
    """Why this tokenizer of transformers is not safe to decode with; empty if it is."""
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        return f"its vocabulary has an entry of {longest} characters; at most {MAX_TOKEN_CHARACTERS} are allowed"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return ""  # written in Python by transformers; the checkpoint only has its vocabulary
    return decoder_problem(json.loads(backend.to_str())["decoder"])


def decoder_problem(decoder: Mapping[str, Any]) -> str:
    """Why a decoder, as `tokenizer.json` describes it, is not used; empty if it is."""
    steps = _steps(decoder)
    if len(steps) > MAX_DECODER_STEPS:
        return f"its decoder has {len(steps)} steps; at most {MAX_DECODER_STEPS} are allowed"
    growth = 1.0
    for step in steps:
        if step.get("type") != "Replace":
            continue  # no other step makes a text longer
        searched = step.get("pattern", {}).get("String")
        if not searched:
            return "its decoder searches for a regular expression, which may take forever"
        growth *= max(1.0, len(step.get("content", "").encode()) / len(searched.encode()))
    if growth > MAX_DECODER_GROWTH:
        return f"its decoder may make a text {growth:.3g} times longer; at most {MAX_DECODER_GROWTH} are allowed"
    return ""


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a decoder, and of those inside it, in order."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", ()) for step in _steps(inner)]


RUST_PANIC = "PanicException"
"""The class of what a bug in the tokenizers' Rust code raises. It has no public name, and is no `Exception`."""


def load_tokenizer(source: str | Path, revision: str | None = None, cache_dir: str | Path | None = None) -> Any:
    """The model's tokenizer, which runs no code of the checkpoint and decodes no token to a very long text.

    Nothing bounds how long it takes to load, or to make tokens of a text: a `PromptProcess` does.

    Args:
        source: local folder, GGUF file or hub id.
        revision: commit of a hub model; ignored for what is on this machine.
        cache_dir: folder for files of the hub.

    Raises:
        CheckpointError: the checkpoint has no usable tokenizer.
    """
    options: dict[str, Any] = {} if revision is None or Path(source).is_dir() else {"revision": revision}
    try:
        gguf = _gguf_with_tokenizer(Path(source))
        if gguf is not None:
            tokenizer = _gguf_tokenizer(gguf)
        else:
            options |= {"cache_dir": cache_dir}
            tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False, **options)
            tokenizer.chat_template = tokenizer.chat_template or _processor_template(source, options)
        problem = tokenizer_problem(tokenizer)
    except BaseException as error:  # foreign input; each family's tokenizer raises its own errors
        if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{source} has no usable tokenizer: {reason}") from error
    if problem:
        raise CheckpointError(f"the tokenizer of {source} is not used: {problem}")
    return tokenizer


def _processor_template(source: str | Path, options: dict[str, Any]) -> Any:
    """The chat template where older models with images have it, which transformers reads for their processors only."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(str(source), LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, **quiet, **options)
    return json.loads(Path(path).read_text())["chat_template"] if path is not None else None


_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _gguf_with_tokenizer(source: Path) -> Path | None:
    """The GGUF file that has the tokenizer: `source`, or the one in a folder without files of a tokenizer."""
    if source.is_dir() and not any((source / one).exists() for one in _FILES):
        return gguf_in(source)
    return source if source.suffix == SUFFIX and source.is_file() else None


def _gguf_tokenizer(path: Path) -> Any:
    """The tokenizer that a GGUF file describes. Raises anything if it is malformed."""
    # Not in the transformers of machines that have no use for it: it came with 5.23.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    path = split_files(path)[0]
    read_header(path)  # within limits, which transformers has not
    architecture, said, options = get_gguf_tokenizer(str(path))
    split = said.get("pre_tokenizer_type")
    if said.get("tokenizer_type") == "gpt2" and split != "gpt-2" and split not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ValueError(
            f"it splits texts as {str(split)[:32]!r} does, which is not read from GGUF. Put the model's tokenizer.json "
            "beside the file, and give the folder"
        )
    return PreTrainedTokenizerFast(tokenizer_object=convert_gguf_tokenizer(architecture, said)[0], **options)
