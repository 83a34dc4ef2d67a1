"""What a model whose blocks are in the swarm has beyond its transformers class: sessions, `generate`, sharing."""

from __future__ import annotations

import inspect
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm.client.connection import SwarmConnection
from swarm.client.forward_hooks import extended_tokens
from swarm.client.lanes.inference_lanes import InferenceLanes
from swarm.client.lanes.lane_count import LaneCount, validate_lane_count
from swarm.client.lanes.lane_threads import generate_in_lanes
from swarm.client.remote_sequential import RemoteSequential
from swarm.client.routes.events import EventListener
from swarm.client.session import InferenceSession
from swarm.client.speculation import bound_candidates, unseen_length, validate_speculation
from swarm.client.threads.compute_lock import ComputeTicket
from swarm.client.tuning.lora import Lora
from swarm.client.tuning.prompted_cache import PromptedCache
from swarm.client.tuning.trained import TrainedParameters
from swarm.errors import UsageError
from swarm.models.placeholder_cache import PlaceholderCache


class ActiveSessions(threading.local):
    """Sessions in use by the current thread."""

    session: InferenceSession | None = None
    own: InferenceSession | None = None


class DistributedModelMixin:
    """What every distributed model has.

    Attributes:
        swarm: the connection; `swarm.close()` disconnects.
        remote_blocks: the blocks as a module; slices of it run some of them.
        prompts: embeddings of the virtual tokens in front of every text, float32 `[pre_seq_len, width]`, or None.
        deep_prompts: what is added to the virtual tokens at the input of each block, float32 `[blocks, pre_seq_len,
            hidden_size]`, or None.
        lora: the LoRA factors by block and module, or None.
    """

    swarm: SwarmConnection
    remote_blocks: RemoteSequential
    prompts: nn.Parameter | None
    deep_prompts: nn.Parameter | None
    lora: Lora | None
    trained: TrainedParameters
    _active: ActiveSessions

    def extra_repr(self) -> str:
        return f"wire={self.swarm.config.wire}"

    @property
    def word_embeddings(self) -> nn.Module:
        """Token ids to the hidden states that `session.step` takes."""
        return self.get_input_embeddings()  # type: ignore[attr-defined, no-any-return]

    def inference_session(self, *, max_length: int, listener: EventListener | None = None) -> InferenceSession:
        """Open a session for up to `max_length` tokens a row; servers reserve room for them at the first step.

        As a context manager it is used by every `generate` inside, which then computes only what is new: a prompt
        that begins with tokens of an earlier call continues there. Virtual tokens are put in front of the first ones;
        `session.position` counts them, `max_length` does not. A session goes on with what was trained when it began.

        Args:
            listener: hears of the session's routes, lost servers and recoveries; see `swarm.client.routes.events`.
        """
        count = 0 if self.prompts is None else len(self.prompts)
        session = InferenceSession(self, self.swarm, max_length + count, listener)
        if count:
            session.cache = PromptedCache(session, count)
        return session

    def inference_lanes(self, lanes: LaneCount = "auto", *, max_length: int) -> InferenceLanes:
        """Open several sessions that are in flight at once; see `InferenceLanes`.

        Args:
            lanes: how many; "auto" for one a server of the route.
            max_length: as for `inference_session`.
        """
        validate_lane_count(lanes)
        count = self.swarm.stages() if lanes == "auto" else lanes
        return InferenceLanes([self.inference_session(max_length=max_length) for _ in range(count)])

    def enter_session(self, session: InferenceSession) -> None:
        """Make `session` the one that `generate` uses in this thread."""
        self._active.session = session

    def leave_session(self, session: InferenceSession) -> None:
        """End the effect of `enter_session`."""
        if self._active.session is session:
            self._active.session = None

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> None:
        """Write what was trained as PEFT does, with a model card that says for which revision of the model it is.

        LoRA and virtual tokens load in plain PEFT. The blocks are the swarm's and are not written.

        Args:
            is_main_process: write nothing if this is another one.
            push_to_hub: upload it, too, to `repo_id` or a repository named like the folder.
            options: others of transformers' `save_pretrained`, which mean nothing here.

        Raises:
            UsageError: nothing of this model was trained.
        """
        if is_main_process:
            # Only `transformers.Trainer` hands a state on; it goes on from its file.
            self.trained.save(save_directory, with_state="state_dict" in options)
        if push_to_hub:
            self.push_to_hub(repo_id or Path(save_directory).name)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload adapter",
        create_pr: bool = False,
    ) -> str:
        """Put the files that `save_pretrained` writes into a repository of the hub, which is made if need be.

        Returns:
            the address of the commit.
        """
        return self.trained.push(
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )


class DistributedGenerationMixin(DistributedModelMixin):
    """What a distributed language model has."""

    def generate(
        self,
        inputs: Any = None,
        *args: Any,
        session: InferenceSession | None = None,
        lanes: LaneCount | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, with everything it takes.

        Args:
            session: the session to use; else the one whose `with` block this is in; else one for this call alone.
            lanes: divide the rows into so many groups, each with a session of its own, that are in flight at once, so
                that servers need not wait for each other; "auto" for one a server of the route. There is at most one
                a row. The texts are the same as without, but for sampled ones, and those depend on the seed and the
                number of lanes alone.

        Raises:
            UsageError: the arguments cannot be divided among lanes; it says why.
        """
        session = session or self._active.session
        if lanes is not None:
            if session is not None:
                raise UsageError(
                    "lanes have sessions of their own; leave session out (and generate outside of its `with`)"
                )
            named = inspect.signature(super().generate).bind(inputs, *args, **kwargs).arguments  # type: ignore[misc]
            settings = named.pop("kwargs", {})
            return generate_in_lanes(self, lanes, {**named, **settings}, self._generate)
        if session is not None and kwargs.get("past_key_values") is None:
            tokens = inputs if inputs is not None else kwargs.get("input_ids")
            _continue_session(session, tokens, kwargs.get("attention_mask"))
            kwargs["past_key_values"] = session.cache
        return self._generate({"inputs": inputs, **kwargs}, None, *args)

    def _generate(self, arguments: dict[str, Any], turn: ComputeTicket | None, *args: Any) -> Any:
        """transformers' `generate`, computing inside the turn if this is one lane of several."""
        try:
            with turn if turn is not None else nullcontext():
                return super().generate(arguments.pop("inputs", None), *args, **arguments)  # type: ignore[misc]
        finally:
            own, self._active.own = self._active.own, None
            if own is not None:
                own.close()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, length: int
    ) -> None:
        """transformers' hook: the cache of a `generate` that was given none is a session of its own."""
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is not False:
            self._active.own = self.inference_session(max_length=max(1, length))
            model_kwargs["past_key_values"] = self._active.own.cache

    def _get_candidate_generator(self, generation_config: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        """transformers' hook: what proposes the candidates of assisted generation."""
        validate_speculation(generation_config, is_draft_remote=isinstance(assistant_model, DistributedModelMixin))
        generator = super()._get_candidate_generator(  # type: ignore[misc]
            generation_config=generation_config, assistant_model=assistant_model, **kwargs
        )
        return bound_candidates(generator, generation_config.max_length - 1)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: torch.Tensor | None = None,  # by name: transformers looks whether it is taken
        **kwargs: Any,
    ) -> Any:
        """transformers' hook: which tokens a forward gets."""
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if next_sequence_length is None and isinstance(cache, PlaceholderCache):
            mask_length = mask.shape[1] if mask is not None else None
            next_sequence_length = unseen_length(cache.get_seq_length(), input_ids.shape[1], mask_length)
        return super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, next_sequence_length=next_sequence_length, **kwargs
        )


def _continue_session(session: InferenceSession, tokens: Any, mask: torch.Tensor | None) -> None:
    """Roll a session back to where it agrees with the prompt of a new `generate`."""
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
        session.position = 0
        return
    if isinstance(session.cache, PromptedCache):
        tokens, mask = extended_tokens(session.cache.count, tokens, mask)
    known = session.cache.common_prefix(tokens, mask)
    # At least one token has to be computed, or there would be no logits to go on from.
    session.position = min(known, tokens.shape[1] - 1)
