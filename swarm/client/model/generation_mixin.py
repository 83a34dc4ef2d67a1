"""Mixins of distributed models: what they add to their transformers class (sessions, `generate`, saving).

transformers prepares each `generate` call, and runs it too, except where tokens leave early or drafts guess them: then
loops of this client take the place of its own (`generation_loop`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from swarm.client.chain.prefix import Prefix
from swarm.client.connection import SwarmConnection
from swarm.client.early_exit.exit_decoder import ExitDecoder
from swarm.client.early_exit.options import EarlyExit
from swarm.client.lanes.generate_in_lanes import (
    InferenceLanes,
    LaneCount,
    batch_size,
    generate_in_lanes,
    validate_lane_count,
)
from swarm.client.model.generation_loop import LoopCall
from swarm.client.model.remote_sequential import RemoteLayer, RemoteSequential
from swarm.client.model.speculation import DraftChoice, assisted_draft, draft_sources, generate_with_drafts
from swarm.client.model.train_draft import DraftMixin
from swarm.client.model.train_exits import ExitsMixin, base_model
from swarm.client.model.transformers_hooks import insert_virtual_tokens
from swarm.client.routes.events import EventListener
from swarm.client.session import InferenceSession
from swarm.client.speculation.drafts import CandidateDraft, DraftSource
from swarm.client.speculation.guess_policy import Acceptance
from swarm.client.threads.compute_lock import ComputeTicket
from swarm.client.tuning.lora import Lora
from swarm.client.tuning.saving import push
from swarm.client.tuning.trained import TrainedParameters
from swarm.client.tuning.virtual_tokens import PromptedCache
from swarm.errors import NoExitClassifiers, UsageError
from swarm.models.exits.trained_exits import TrainedExits
from swarm.models.images import ImageTower, PromptImages
from swarm.models.placeholder_cache import PlaceholderCache


class ActiveSessions(threading.local):
    """The sessions that the current thread uses.

    Attributes:
        entered: the session whose `with` block the thread is in.
        temporary: the session of one `generate` call alone.
        early_exit: when the tokens of this `generate` call leave; None for never.
        drafts: what makes the drafts of this `generate` call; none if it does not say.
        images: the prompt of this `generate` call, if there are images in it.
    """

    entered: InferenceSession | None = None
    temporary: InferenceSession | None = None
    early_exit: EarlyExit | None = None
    drafts: Sequence[DraftSource] = ()
    images: PromptImages | None = None


class DistributedModelMixin:
    """Mixin of every distributed model.

    Attributes:
        swarm: the connection; `swarm.close()` disconnects.
        remote_blocks: the blocks as a module; slices of it run some of them.
        remote_layer: stands for the blocks inside the model.
        prompts: embeddings of the virtual tokens before every text, float32 `[pre_seq_len, width]`, or None.
        deep_prompts: what is added to the virtual tokens at the input of each block, float32 `[blocks, pre_seq_len,
            hidden_size]`, or None.
        lora: the LoRA factors by block and module, or None.
        trained: the parameters that are trained or were loaded from an adapter.
    """

    swarm: SwarmConnection
    remote_blocks: RemoteSequential
    remote_layer: RemoteLayer
    prompts: nn.Parameter | None
    deep_prompts: nn.Parameter | None
    lora: Lora | None
    trained: TrainedParameters
    _active: ActiveSessions
    _guess_memory: dict[str, Acceptance]
    _tower: ImageTower

    def extra_repr(self) -> str:
        return f"wire={self.swarm.config.wire}"

    @property
    def word_embeddings(self) -> nn.Module:
        """The module that turns token ids into the hidden states that `session.step` takes."""
        return self.get_input_embeddings()  # type: ignore[attr-defined, no-any-return]

    def inference_session(
        self,
        *,
        max_length: int,
        listener: EventListener | None = None,
        early_exit: EarlyExit | None = None,
        keep_receipts: bool = False,
        prefix: Prefix | None = None,
    ) -> InferenceSession:
        """A session for up to `max_length` tokens of each sequence; servers reserve cache space at the first step.

        Inside its `with` block every `generate` uses it and computes only what is new: a prompt that begins with the
        tokens of an earlier call continues there. Virtual tokens are inserted before the first tokens;
        `session.position` counts them, `max_length` does not. If training goes on, the session keeps the parameters
        with which it began.

        Args:
            listener: receives the session's events (routes, lost servers, recoveries); see
                `swarm.client.routes.events`.
            early_exit: when tokens leave early in every `generate` that uses the session and does not say. The session
                is opened for that.
            keep_receipts: have servers that are left, and all at the end, sign what they have computed; see
                `InferenceSession.receipts`.
            prefix: what an earlier session has computed, from its `park`. The session is opened now, begins with that,
                and computes what follows; see `InferenceSession.begin_with`.
        """
        count = 0 if self.prompts is None else len(self.prompts)
        session = InferenceSession(self, self.swarm, max_length + count, listener, keep_receipts)
        if early_exit is not None:
            session.prepare_for(early_exit)
            session.early_exit = early_exit
        if count:
            session.cache = PromptedCache(session, count)
        if prefix is not None:
            session.begin_with(prefix)
        return session

    def inference_lanes(self, lanes: LaneCount = "auto", *, max_length: int) -> InferenceLanes:
        """Several sessions whose steps are in flight at once; see `InferenceLanes`.

        Args:
            lanes: how many; "auto" for one for each server of the route.
            max_length: as for `inference_session`.
        """
        validate_lane_count(lanes)
        count = self.swarm.stage_count() if lanes == "auto" else lanes
        return InferenceLanes([self.inference_session(max_length=max_length) for _ in range(count)])

    def enter_session(self, session: InferenceSession) -> None:
        """Make `generate` use `session` in this thread."""
        self._active.entered = session

    def leave_session(self, session: InferenceSession) -> None:
        """End the effect of `enter_session`."""
        if self._active.entered is session:
            self._active.entered = None

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> None:
        """Write the trained parameters in PEFT's format, with a model card that names the revision of the model.

        LoRA and virtual tokens load in plain PEFT. The blocks belong to the swarm and are not written.

        Args:
            is_main_process: False to write nothing.
            push_to_hub: also upload the files, to `repo_id` or to a repository with the folder's name.
            options: other options of transformers' `save_pretrained`; they have no effect.

        Raises:
            UsageError: no parameter of this model was trained.
        """
        if is_main_process:
            # Only `transformers.Trainer` passes a state; it resumes training from the state's file.
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
        """Upload the files that `save_pretrained` writes to a repository of the hub; it is created if it is missing.

        Returns:
            the URL of the commit.
        """
        return push(
            self.trained.snapshot(),
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )


class DistributedGenerationMixin(ExitsMixin, DraftMixin, DistributedModelMixin):
    """Mixin of distributed language models: `generate` over sessions and lanes."""

    def generate(
        self,
        inputs: Any = None,
        *args: Any,
        session: InferenceSession | None = None,
        lanes: LaneCount | None = None,
        early_exit: EarlyExit | Literal["session"] | None = "session",
        draft: DraftChoice | Sequence[DraftChoice] | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, with all its arguments; also `pixel_values` and what a processor returns with them,
        of models that take images. Their tower is loaded at this client when the first image comes.

        Args:
            session: the session to use; by default that of the surrounding `with` block, or a temporary one.
            lanes: divide the batch into this many groups, each with its own session, that are in flight at once, so
                that servers need not wait for each other; "auto" for one for each server of the route. There is at most
                one lane for each sequence. The texts are the same as without lanes, except sampled ones, which depend
                only on the seed and the number of lanes.
            early_exit: let tokens leave before the last block where they are sure; None for never. By default as the
                session says, and never without one. Unless all sequences of a batch leave together, or inside servers'
                spans, each has a session of its own, as with lanes.
            draft: what guesses the next tokens, so that many are under way at once: "copies" for what stood in the
                text before, "head" for the draft head that `train_draft` has made, a small model with the same tokens
                that runs here, a function that makes a `Draft` of your own, or several of these. The tokens are those
                without. Each text of a batch has a session of its own. transformers' `assistant_model`, also with
                `assistant_tokenizer`, and `prompt_lookup_num_tokens` do the same.

        Raises:
            UsageError: the arguments cannot be divided among lanes, or tokens cannot leave early or be guessed in this
                mode or session.
            UnsupportedModel: the model takes no images here.
        """
        session = session or self._active.entered
        if early_exit == "session":
            early_exit = session.early_exit if session is not None else None
        tokens = inputs if inputs is not None else kwargs.get("input_ids")
        if kwargs.get("pixel_values") is not None:
            kwargs["prompt_images"] = self._tower.take(tokens, kwargs)
        images = kwargs.get("prompt_images")
        arguments = {"inputs": inputs, **kwargs}
        drafts = draft_sources(self, draft)
        is_divided = early_exit is not None and early_exit.needs_sessions
        if (is_divided or drafts or self._is_assisted(kwargs)) and session is None and batch_size(arguments) > 1:
            lanes = batch_size(arguments)
        if lanes is not None:
            if session is not None:
                raise UsageError(
                    "lanes open their own sessions; leave session out (and call generate outside its `with` block)"
                )
            named = inspect.signature(super().generate).bind(inputs, *args, **kwargs).arguments  # type: ignore[misc]
            settings = named.pop("kwargs", {})
            generate = partial(self._generate, early_exit=early_exit, drafts=drafts)
            return generate_in_lanes(self, lanes, {**named, **settings}, generate)
        if session is not None and kwargs.get("past_key_values") is None:
            tokens = images.marks if images is not None else tokens
            if early_exit is not None:
                session.prepare_for(early_exit)
            _continue_session(session, tokens, kwargs.get("attention_mask"), early_exit)
            kwargs["past_key_values"] = session.cache
        return self._generate({"inputs": inputs, **kwargs}, None, *args, early_exit=early_exit, drafts=drafts)

    def _is_assisted(self, settings: Mapping[str, Any]) -> bool:
        """Whether a call asks for transformers' own kinds of speculation."""
        config = settings.get("generation_config") or self.generation_config  # type: ignore[attr-defined]
        lookup = settings.get("prompt_lookup_num_tokens", getattr(config, "prompt_lookup_num_tokens", None))
        return lookup is not None or settings.get("assistant_model") is not None

    def prompt_images(self, input_ids: torch.Tensor, **images: Any) -> PromptImages:
        """What `generate` makes of `pixel_values` and the like, and takes as `prompt_images` for the same tokens."""
        return self._tower.take(input_ids, images)

    def _generate(
        self,
        arguments: dict[str, Any],
        ticket: ComputeTicket | None,
        *args: Any,
        early_exit: EarlyExit | None,
        drafts: Sequence[DraftSource],
    ) -> Any:
        """transformers' `generate`, inside the ticket if this is one lane of several."""
        if early_exit is not None and drafts:
            raise UsageError("tokens that leave early are guesses already; pass early_exit=None, or leave draft out")
        self._active.early_exit, self._active.images = early_exit, arguments.pop("prompt_images", None)
        self._active.drafts = drafts
        if early_exit is not None or drafts:
            arguments.setdefault("use_cache", True)  # a few families, such as mpt, do without unless they are told
        try:
            with ticket if ticket is not None else nullcontext():
                return super().generate(arguments.pop("inputs", None), *args, **arguments)  # type: ignore[misc]
        finally:
            self._active.early_exit = self._active.images = None
            self._active.drafts = ()
            temporary, self._active.temporary = self._active.temporary, None
            if temporary is not None:
                temporary.close()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, length: int
    ) -> None:
        """transformers' hook: a `generate` call without a cache gets a temporary session."""
        if (mode := generation_mode.value) not in ("greedy_search", "sample"):
            found = f"is for greedy search and sampling, not for {mode.replace('_', ' ')}"
            if self._active.early_exit is not None:
                raise UsageError(f"early_exit {found}; pass early_exit=None")
            if self._active.drafts:
                raise UsageError(f"draft {found}; leave it out")
        given = model_kwargs.get("past_key_values")
        options = self._active.early_exit
        takes_approximate = options is not None and options.fill == "project"
        if isinstance(given, PlaceholderCache) and given.exact_length < given.length and not takes_approximate:
            raise UsageError(
                "past_key_values belong to a session whose caches early_exit with fill='project' has made approximate; "
                "pass the session instead (generate then computes again what is approximate), or use another one"
            )
        if given is None and generation_config.use_cache is not False:
            self._active.temporary = self.inference_session(max_length=max(1, length), early_exit=options)
            self._active.temporary.grows = True  # PEFT's prompts come in front of what was counted
            model_kwargs["past_key_values"] = self._active.temporary.cache

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' hook: the loop of greedy search and sampling."""
        options, drafts = self._active.early_exit, self._active.drafts
        if options is None and not drafts:
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **kwargs
            )
        option = "draft" if options is None else "early_exit"
        call = LoopCall(option, input_ids, logits_processor, stopping_criteria, generation_config, streamer, kwargs)
        if options is not None:
            return sample_with_exits(self, options, call)
        return generate_with_drafts(self, [make() for make in drafts], call)

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' hook: the loop of assisted generation, and of prompt lookup."""
        call = LoopCall(
            *("assistant_model", input_ids, logits_processor, stopping_criteria, generation_config, streamer, kwargs)
        )
        choice = assisted_draft(generation_config, assistant_model)
        if choice is assistant_model and assistant_tokenizer is not None and tokenizer is not None:
            generator = super()._get_candidate_generator(  # type: ignore[misc]
                generation_config=generation_config,
                input_ids=input_ids,
                inputs_tensor=inputs_tensor,
                logits_processor=logits_processor,
                model_kwargs=kwargs,
                assistant_model=assistant_model,
                target_tokenizer=tokenizer,
                assistant_tokenizer=assistant_tokenizer,
            )
            return generate_with_drafts(self, [CandidateDraft(generator, input_ids.device)], call)
        return generate_with_drafts(self, [make() for make in draft_sources(self, choice)], call)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: torch.Tensor | None = None,  # named, because transformers checks the signature for it
        **kwargs: Any,
    ) -> Any:
        """transformers' hook: the inputs of the next forward."""
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if next_sequence_length is None and isinstance(cache, PlaceholderCache):
            mask_length = mask.shape[1] if mask is not None else None
            next_sequence_length = unseen_length(cache.get_seq_length(), input_ids.shape[1], mask_length)
        if isinstance(cache, PlaceholderCache) and self._crosses_rope_limit(cache, input_ids, mask):
            cache.set_length(0)
            next_sequence_length = None
        inputs = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, next_sequence_length=next_sequence_length, **kwargs
        )
        if isinstance(cache, PlaceholderCache) and inputs.get("past_key_values") is None:
            cache.set_length(0)  # the family begins again
            inputs["past_key_values"] = cache
        return inputs

    def _crosses_rope_limit(self, cache: PlaceholderCache, input_ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether a sequence grows beyond the length where the family begins again, with other rotary frequencies.

        The family itself looks at the length with padding.
        """
        limit, past = cache.session.rope_limit, cache.get_seq_length()
        if limit is None or not 0 < past <= input_ids.shape[1]:
            return False
        real = mask if mask is not None else torch.ones_like(input_ids)
        before, after = real[:, :past].sum(1), real.sum(1)
        return bool(((before <= limit) & (after > limit)).any()) and self._begins_again(limit)

    def _begins_again(self, limit: int) -> bool:
        """Whether the family drops its cache where a sequence grows beyond `limit` tokens."""
        probe = PlaceholderCache(self)
        probe.length = limit
        prepare = super().prepare_inputs_for_generation  # type: ignore[misc]
        return (
            prepare(torch.zeros(1, limit + 1, dtype=torch.long), past_key_values=probe).get("past_key_values") is None
        )


def _continue_session(
    session: InferenceSession, tokens: Any, mask: torch.Tensor | None, early_exit: EarlyExit | None
) -> None:
    """Roll a session back to the longest prefix that it shares with the prompt of a new `generate` call.

    What may have left inside a server's span is computed again, unless this call takes approximate caches as well.
    """
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
        session.position = 0
        return
    if isinstance(session.cache, PromptedCache):
        tokens, mask = insert_virtual_tokens(session.cache.count, tokens, mask)
    known = session.cache.common_prefix(tokens, mask)
    if session.rope_limit is not None and max(session.cache.longest, tokens.shape[1]) > session.rope_limit:
        known = 0  # the rotary frequencies of all tokens depend on how long the text is
    if early_exit is None or early_exit.fill == "exact":
        known = min(known, session.cache.exact_length)
    # At least one token has to be computed, because the next one is chosen from its logits.
    session.position = min(known, tokens.shape[1] - 1)


def unseen_length(cache_length: int, input_length: int, mask_length: int | None) -> int | None:
    """How many of the last tokens of a text still have to be computed, if a session has computed those before.

    With `use_cache=False`, transformers passes the whole text each time. None means all tokens that were passed:
    nothing is computed yet, or only new tokens were passed.
    """
    if not 0 < cache_length < input_length or mask_length not in (None, input_length):
        return None
    return input_length - cache_length


def sample_with_exits(model: Any, options: EarlyExit, call: LoopCall) -> Any:
    """The sequences with what follows them.

    Raises:
        UsageError: the call asks for something that tokens which leave early do not have, or that its session was not
            opened for.
        ProcessorsWithState: it asks for logits processors that do not work with them; nothing was computed.
        NoExitClassifiers: no token could leave on this route; the session holds the prompt.
    """
    session, tokens_RT = call.session, call.tokens_RT
    if session.rope_limit is not None and tokens_RT.shape[1] <= session.rope_limit < call.max_length:
        raise UsageError(
            f"early_exit does not go beyond {session.rope_limit} tokens with this model, whose rotary frequencies "
            "change there, so that a text begins again; pass a smaller max_new_tokens, or early_exit=None"
        )
    session.prepare_for(options)
    logits_RV, forward = call.prefill(model)
    exits = (model.exits or TrainedExits(base_model(model))).to(tokens_RT.device)
    if options.confidence == "classifier" and options.fill == "exact":
        _require_classifiers(exits, session.boundaries)
    decoder = ExitDecoder(options, exits, session, forward, call.sampling, call.output)
    return call.result(decoder.generate(tokens_RT, logits_RV))


def _require_classifiers(exits: TrainedExits, boundaries: Sequence[int]) -> None:
    if boundaries and not exits.classifiers.keys() & set(boundaries):
        places = ", ".join(map(str, boundaries))
        raise NoExitClassifiers(
            f"confidence='classifier': the model has no classifier for any of the blocks {places}, where servers of "
            "this route begin; train them with model.train_exits(kind='classifier')"
        )
