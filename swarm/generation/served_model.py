"""A model that is ready to answer requests, with everything that its requests share."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
from swarm.client.model.speculation import DraftChoice, draft_sources
from swarm.client.speculation.drafts import DraftSource
from swarm.client.threads.compute_lock import ComputeLock
from swarm.common.warn_once import WarnOnce
from swarm.errors import AdapterError, AdapterMismatch, InvalidOption, UnsupportedModel, UsageError
from swarm.generation.formats.response_format import GrammarCompiler
from swarm.generation.formats.thinking import ThinkingSyntax, thinking_syntax
from swarm.generation.formats.tool_calls import ToolSyntax, tool_syntax
from swarm.generation.prefix_store import PrefixStore, default_bytes
from swarm.generation.room_queue import RoomQueue
from swarm.models.adapters.adapter_files import MAX_WEIGHTS_BYTES, AdapterSource
from swarm.models.checkpoints.checkpoint import Checkpoint, Pooling
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.cutting.families import check_images
from swarm.models.draft_head import HEAD_FILE
from swarm.models.tokenizers.chat_template import template_text
from swarm.models.tokenizers.end_token import add_end_token
from swarm.models.tokenizers.image_prompt import NO_PACKAGE
from swarm.models.tokenizers.prompt_process import PromptProcess
from swarm.models.tokenizers.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_TOKENS = 8192
"""Context length of a model whose config does not state one."""


@dataclass
class ServedModel:
    """One distributed model with its tokenizer, and what its requests share.

    Attributes:
        name: what clients call it.
        model: the distributed model.
        prompts: makes tokens of conversations and texts.
        pooling: how embeddings of texts are made; None if that is not known.
        no_images: why it takes no images here; empty if it does.
        drafts: what makes the drafts of each text.
        prefixes: what texts have left at servers.
        compute_lock: lets one sequence at a time compute its local part.
        room: whose turn it is to ask the servers for room.
        created: Unix time.
        warn_once: for what many requests may have the same reason to say.
    """

    name: str
    model: Any
    tokenizer: Any
    prompts: PromptProcess
    pooling: Pooling | None = "mean"
    no_images: str = "this model takes no images; leave them out"
    drafts: list[DraftSource] = field(default_factory=list)
    prefixes: PrefixStore = field(default_factory=lambda: PrefixStore(default_bytes()))
    compute_lock: ComputeLock = field(default_factory=ComputeLock)
    room: RoomQueue = field(default_factory=RoomQueue)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.warn_once = WarnOnce(logger, f"{self.name}: ")

    @classmethod
    def load(cls, source: str | None, **options: Any) -> ServedModel:
        """Load embeddings, head and tokenizer, and join the swarm.

        Args:
            source: local folder or hub id; None for the demo model.
            options: of `from_pretrained`.

        Raises:
            UsageError: the model cannot be found or used, or no initial peer answers; see `from_pretrained`.
        """
        cache_dir = options.get("cache_dir")
        checkpoint = AutoDistributedModelForCausalLM.open_checkpoint(source, **options)
        if checkpoint.parts is not None:  # what peers have sent is a folder of its own
            source, options = checkpoint.source, {**options, "revision": None, "weights_from": "hub"}
        with ExitStack() as on_failure:
            prompts = PromptProcess(checkpoint.source, checkpoint.revision, cache_dir)
            on_failure.callback(prompts.close)
            model = AutoDistributedModelForCausalLM.from_pretrained(source, **options)
            on_failure.callback(model.swarm.close)
            prompts.require_loaded()  # within limits, so that it can be loaded here
            tokenizer = load_tokenizer(checkpoint.source, checkpoint.revision, cache_dir)
            add_end_token(model, tokenizer.eos_token_id)  # which may be its class's, and in no file
            on_failure.pop_all()
        return cls(checkpoint.name, model, tokenizer, prompts, checkpoint.pooling(), _why_no_images(checkpoint))

    @property
    def created_at(self) -> str:
        """When it was loaded, as in `2026-11-29T05:00:00+00:00`."""
        return datetime.fromtimestamp(self.created, UTC).isoformat()

    def close(self) -> None:
        """Leave the swarm, and end the process that makes prompts."""
        self.model.swarm.close()
        self.prompts.close()

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT_TOKENS)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with what answers depend on besides requests: the weights, and how hidden states travel."""
        swarm = self.model.swarm
        seen = f"{self.name} {swarm.identity.revision} {swarm.config.wire}"
        return "fp_" + hashlib.blake2b(seen.encode(), digest_size=5).hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """Number of scores that the head computes for a position."""
        return int(self.model.config.vocab_size)

    @property
    def has_exit_classifiers(self) -> bool:
        """Whether `EarlyExit(confidence="classifier")` can be used."""
        return self.model.exits is not None and bool(self.model.exits.classifiers)

    @cached_property
    def chat_template(self) -> str | None:
        return template_text(self.tokenizer)

    @cached_property
    def tool_syntax(self) -> ToolSyntax | None:
        """How the model writes tool calls; None if its chat template does not support tools."""
        return tool_syntax(self.chat_template) if self.chat_template is not None else None

    @cached_property
    def thinking_syntax(self) -> ThinkingSyntax | None:
        """How the model marks its thoughts; None if it has none that are known here."""
        return thinking_syntax(self.chat_template) if self.chat_template is not None else None

    @cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.vocabulary_size, sorted(self.end_tokens))

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        end = self.model.generation_config.eos_token_id
        return frozenset([end] if isinstance(end, int) else end or ())

    def missing_blocks(self) -> tuple[int, ...]:
        """Blocks that no server holds now. Asks the swarm, which may take seconds."""
        held = {block for server in self.model.swarm.servers() for block in range(server.span.start, server.span.end)}
        needed = range(self.model.swarm.span.start, self.model.swarm.span.end)
        return tuple(block for block in needed if block not in held)


def add_drafts(models: Sequence[ServedModel], drafts: Sequence[str]) -> None:
    """Add each draft to every model for which it can guess.

    Args:
        drafts: "copies", the folders or hub ids of draft heads, or of small models, which are loaded here, or "none",
            which adds nothing.

    Raises:
        InvalidOption: a draft cannot be loaded, or fits none of the models.
    """
    for draft in drafts:
        if draft == "none":
            continue
        try:
            fits = _fitting(models, draft)
        except (OSError, ValueError, UsageError) as error:
            raise InvalidOption(f"--draft {draft} cannot be loaded: {error}") from error
        if not fits:
            names = ", ".join(served.name for served in models)
            raise InvalidOption(
                f"--draft {draft} fits none of {names}: a small model needs the same tokens, and a draft head guesses "
                "only for the model for which it was trained; use another one, or 'copies'"
            )
        for served, choice in fits:
            served.drafts += draft_sources(served.model, choice)


def _fitting(models: Sequence[ServedModel], draft: str) -> list[tuple[ServedModel, DraftChoice]]:
    """The models for which a draft can guess, and what `generate` takes for it."""
    if draft == "copies":
        return [(served, draft) for served in models]
    if _is_draft_head(draft):
        return [(served, "head") for served in models if _takes_head(served, draft)]
    vocabulary = load_tokenizer(draft).get_vocab()
    fits = [served for served in models if served.tokenizer.get_vocab() == vocabulary]
    if not fits:
        return []
    small = load_local_model(draft).eval()
    return [(served, small) for served in fits]


def _is_draft_head(draft: str) -> bool:
    try:
        return AdapterSource(draft).fetch(HEAD_FILE, MAX_WEIGHTS_BYTES) is not None
    except AdapterError:  # the hub does not answer; a small model may be on this machine
        return False


def _takes_head(served: ServedModel, draft: str) -> bool:
    """Load a draft head for a model; False if it is for another one."""
    try:
        served.model.load_draft(draft)
    except AdapterMismatch:
        return False
    return True


def _why_no_images(checkpoint: Checkpoint) -> str:
    try:
        check_images(checkpoint.whole_config())
    except UnsupportedModel as error:
        return str(error)
    if checkpoint.parts is not None:
        return "images need the model's tower, which peers do not share: load the model from the hub or from its folder"
    return "" if find_spec("PIL") is not None else NO_PACKAGE.format("pillow")
