"""What each lane's `generate` is called with: the arguments of one `generate`, its rows divided among lanes.

Whatever cannot be divided faithfully is refused before anything is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.errors import UsageError

PROMPT_ARGUMENTS = ("inputs", "input_ids", "inputs_embeds")
"""Where a prompt may be; the first one that is given counts."""

BATCHED_ARGUMENTS = (
    *PROMPT_ARGUMENTS,
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)
"""Arguments that have a row for each text."""

GENERATE_ARGUMENTS = (
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
    *("assistant_model", "streamer", "custom_generate", "tokenizer", "assistant_tokenizer", "trust_remote_code"),
)
"""Arguments that belong to transformers' `generate` itself; the rest are settings, or go to the model."""

WHOLE_BATCH_PROCESSORS = (
    *("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"),
    *("PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    "ClassifierFreeGuidanceLogitsProcessor",
)
"""transformers' processors that are built around the rows of one batch. As arguments of `generate` they do work."""


@dataclass(frozen=True)
class LanePlan:
    """What counts of a `generate` that is to be divided.

    Attributes:
        rows: texts that go in.
        num_beams, num_return_sequences: as in transformers.
        pad, eos: token ids, None where there is none.
    """

    rows: int
    num_beams: int
    num_return_sequences: int
    pad: int | None
    eos: int | None

    @property
    def fill(self) -> int | None:
        """What transformers writes behind a text that has ended before another one."""
        if self.num_beams > 1:
            return -1 if self.eos is None else self.pad or self.eos
        return self.pad if self.pad is not None else self.eos


def batch_size(arguments: Mapping[str, Any]) -> int:
    """Texts of a batch; 1 where transformers begins by itself."""
    for name in PROMPT_ARGUMENTS:
        if isinstance(given := arguments.get(name), torch.Tensor) and given.ndim:
            return int(given.shape[0])
    return 1


def plan_lanes(model: Any, arguments: Mapping[str, Any]) -> LanePlan:
    """Read the arguments, and refuse what lanes cannot do.

    Raises:
        UsageError: says what, why, and what to do instead.
    """
    settings = {
        name: value for name, value in arguments.items() if name not in (*GENERATE_ARGUMENTS, *BATCHED_ARGUMENTS)
    }
    config, to_model = model._prepare_generation_config(arguments.get("generation_config"), **settings)
    rows = batch_size(arguments)
    _check_controls(arguments, to_model)
    _check_rows(arguments, to_model, rows)
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise UsageError(f"{name} cannot be collected from lanes, which end at different steps; leave lanes out")
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, Sequence) else config.eos_token_id
    made = LanePlan(rows, config.num_beams, config.num_return_sequences, _number(config.pad_token_id), _number(eos))
    ends_early = arguments.get("stopping_criteria") or config.stop_strings or config.max_time
    if made.fill is None and ends_early:
        raise UsageError("a lane may end before another one, and there is nothing to fill up with; say pad_token_id=…")
    return made


def lane_arguments(arguments: Mapping[str, Any], made: LanePlan, rows: slice) -> dict[str, Any]:
    """The arguments of the lane that has these rows."""
    lane = {name: value[rows] if _is_divided(name, value, made.rows) else value for name, value in arguments.items()}
    for name in ("logits_processor", "stopping_criteria"):
        if lane.get(name):
            lane[name] = type(lane[name])([_own(one) for one in lane[name]])
    allowed = lane.get("prefix_allowed_tokens_fn")
    if allowed is not None:
        # Beams belong to their text; several sampled texts of one prompt count as texts of their own.
        texts = 1 if made.num_beams > 1 else made.num_return_sequences
        lane["prefix_allowed_tokens_fn"] = _numbered_from(rows.start * texts, allowed)
    return lane


def _check_controls(arguments: Mapping[str, Any], to_model: Mapping[str, Any]) -> None:
    if to_model.get("past_key_values") is not None:
        raise UsageError("lanes have sessions of their own; leave past_key_values out, or lanes")
    if arguments.get("streamer") is not None:
        raise UsageError(
            "a streamer is told one text's tokens in order, and lanes write several at once; leave one out"
        )
    if arguments.get("custom_generate") is not None:
        raise UsageError("lanes run transformers' own generate; leave custom_generate out, or lanes")
    for name in ("logits_processor", "stopping_criteria"):
        for one in arguments.get(name) or ():
            _check_row_by_row(name, one)


def _check_row_by_row(name: str, one: Any) -> None:
    kind = type(one).__name__
    if kind in WHOLE_BATCH_PROCESSORS:
        raise UsageError(f"a {kind} is made for all rows at once; give generate its setting instead of the object")
    if not _is_of_transformers(one) and not getattr(one, "row_by_row", False):
        raise UsageError(
            f"{name}: a {kind} would be called by each lane in turn with that lane's rows only; if it treats every row "
            "by itself and keeps nothing from call to call, say so with an attribute row_by_row = True; else leave "
            "lanes out"
        )


def _check_rows(arguments: Mapping[str, Any], to_model: Mapping[str, Any], rows: int) -> None:
    for name in BATCHED_ARGUMENTS:
        value = arguments.get(name)
        if isinstance(value, torch.Tensor) and value.shape[:1] not in ((rows,), (1,)):
            raise UsageError(f"{name} is {list(value.shape)}, but there are {rows} rows")
    for name, value in to_model.items():
        if isinstance(value, torch.Tensor) and value.ndim and name not in BATCHED_ARGUMENTS:
            raise UsageError(f"it is not known whether {name} has an entry for each row; leave it out, or lanes")


def _is_divided(name: str, value: Any, rows: int) -> bool:
    return name in BATCHED_ARGUMENTS and isinstance(value, torch.Tensor) and value.shape[0] == rows


def _own(one: Any) -> Any:
    """transformers' own may remember something between calls, such as when they began."""
    return copy.deepcopy(one) if _is_of_transformers(one) else one


def _is_of_transformers(one: Any) -> bool:
    return type(one).__module__.partition(".")[0] == "transformers"


def _number(token: Any) -> int | None:
    return None if token is None else int(token)


def _numbered_from(first: int, allowed: Callable[[int, torch.Tensor], list[int]]) -> Callable[..., list[int]]:
    return lambda row, tokens: allowed(first + row, tokens)
