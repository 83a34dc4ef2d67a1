"""The arguments of each lane's `generate` call: those of the caller, with the sequences divided among lanes.

Arguments that cannot be divided without changing the result are refused before anything is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.errors import UsageError

PROMPT_ARGUMENTS = ("inputs", "input_ids", "inputs_embeds")
"""Arguments that may hold the prompt; the first one that is given counts."""

BATCHED_ARGUMENTS = (
    *PROMPT_ARGUMENTS,
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)
"""Arguments that have one row for each sequence."""

GENERATE_ARGUMENTS = (
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
    *("assistant_model", "streamer", "custom_generate", "tokenizer", "assistant_tokenizer", "trust_remote_code"),
)
"""Arguments of transformers' `generate` itself; all others are settings, or go to the model."""

WHOLE_BATCH_PROCESSORS = (
    *("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"),
    *("PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    "ClassifierFreeGuidanceLogitsProcessor",
)
"""Processors of transformers that hold the rows of one batch. The settings of `generate` that create them do work."""


@dataclass(frozen=True)
class LanePlan:
    """What the lanes of one `generate` call have in common.

    Attributes:
        sequences: sequences of the whole batch.
        num_beams, num_return_sequences: as in transformers.
        pad, eos: token ids; None if the model has none.
    """

    sequences: int
    num_beams: int
    num_return_sequences: int
    pad: int | None
    eos: int | None

    @property
    def fill_token(self) -> int | None:
        """The token that transformers writes after the end of a text while others go on; None if there is none."""
        if self.num_beams > 1:
            return -1 if self.eos is None else self.pad or self.eos
        return self.pad if self.pad is not None else self.eos


def batch_size(arguments: Mapping[str, Any]) -> int:
    """The number of sequences in the arguments; 1 if there is no prompt."""
    for name in PROMPT_ARGUMENTS:
        if isinstance(given := arguments.get(name), torch.Tensor) and given.ndim:
            return int(given.shape[0])
    return 1


def plan_lanes(model: Any, arguments: Mapping[str, Any]) -> LanePlan:
    """Read the arguments of one `generate` call.

    Raises:
        UsageError: lanes cannot do something that the arguments ask for.
    """
    settings = {
        name: value for name, value in arguments.items() if name not in (*GENERATE_ARGUMENTS, *BATCHED_ARGUMENTS)
    }
    config, model_arguments = model._prepare_generation_config(arguments.get("generation_config"), **settings)
    sequences = batch_size(arguments)
    _require_supported(arguments, model_arguments)
    _require_divisible(arguments, model_arguments, sequences)
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise UsageError(f"{name} cannot be collected from lanes, which end at different steps; leave lanes out")
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, Sequence) else config.eos_token_id
    pad, eos = _optional_int(config.pad_token_id), _optional_int(eos)
    plan = LanePlan(sequences, config.num_beams, config.num_return_sequences, pad, eos)
    may_end_early = arguments.get("stopping_criteria") or config.stop_strings or config.max_time
    if plan.fill_token is None and may_end_early:
        raise UsageError("a lane may end before the others, and there is no token to pad it with; pass pad_token_id=…")
    return plan


def lane_arguments(arguments: Mapping[str, Any], plan: LanePlan, part: slice) -> dict[str, Any]:
    """The arguments of the lane that has the sequences of `part`."""
    lane = {
        name: value[part] if _is_batched(name, value, plan.sequences) else value for name, value in arguments.items()
    }
    for name in ("logits_processor", "stopping_criteria"):
        if lane.get(name):
            lane[name] = type(lane[name])([_copy_for_lane(one) for one in lane[name]])
    allowed = lane.get("prefix_allowed_tokens_fn")
    if allowed is not None:
        # Beams belong to their text; several sampled texts of one prompt count as separate texts.
        texts = 1 if plan.num_beams > 1 else plan.num_return_sequences
        lane["prefix_allowed_tokens_fn"] = _shift_batch_index(part.start * texts, allowed)
    return lane


def _require_supported(arguments: Mapping[str, Any], model_arguments: Mapping[str, Any]) -> None:
    if model_arguments.get("past_key_values") is not None:
        raise UsageError("lanes open their own sessions; leave out past_key_values, or lanes")
    if arguments.get("streamer") is not None:
        raise UsageError(
            "a streamer takes the tokens of one text in order, but lanes generate several texts at once; leave one out"
        )
    if arguments.get("custom_generate") is not None:
        raise UsageError("lanes run transformers' own generate; leave out custom_generate, or lanes")
    for name in ("logits_processor", "stopping_criteria"):
        for one in arguments.get(name) or ():
            _require_row_by_row(name, one)


def _require_row_by_row(name: str, one: Any) -> None:
    kind = type(one).__name__
    if kind in WHOLE_BATCH_PROCESSORS:
        raise UsageError(f"a {kind} is made for the whole batch; pass the setting of generate instead of the object")
    if not _is_of_transformers(one) and not getattr(one, "row_by_row", False):
        raise UsageError(
            f"{name}: each lane would call the {kind} with its own rows only. If it treats every row separately and "
            "keeps no state between calls, declare that with an attribute row_by_row = True; else leave lanes out"
        )


def _require_divisible(arguments: Mapping[str, Any], model_arguments: Mapping[str, Any], sequences: int) -> None:
    for name in BATCHED_ARGUMENTS:
        value = arguments.get(name)
        if isinstance(value, torch.Tensor) and value.shape[:1] not in ((sequences,), (1,)):
            raise UsageError(f"{name} has the shape {list(value.shape)}, but the batch has {sequences} rows")
    for name, value in model_arguments.items():
        if isinstance(value, torch.Tensor) and value.ndim and name not in BATCHED_ARGUMENTS:
            raise UsageError(f"{name} may or may not have an entry for each row; leave it out, or lanes")


def _is_batched(name: str, value: Any, sequences: int) -> bool:
    return name in BATCHED_ARGUMENTS and isinstance(value, torch.Tensor) and value.shape[0] == sequences


def _copy_for_lane(one: Any) -> Any:
    """A copy of transformers' own objects, which may keep state between calls, such as the time of the first."""
    return copy.deepcopy(one) if _is_of_transformers(one) else one


def _is_of_transformers(one: Any) -> bool:
    return type(one).__module__.partition(".")[0] == "transformers"


def _optional_int(token: Any) -> int | None:
    return None if token is None else int(token)


def _shift_batch_index(first: int, allowed: Callable[[int, torch.Tensor], list[int]]) -> Callable[..., list[int]]:
    return lambda index, tokens: allowed(first + index, tokens)
