"""Lanes of one `generate` call: recurrent pipeline parallelism (MDI-LLM, section III-C).

The next token of a text can be computed only when the one before is known, so a chain of servers that generates one
text keeps all servers but one waiting. Several groups of sequences, each with its own caches at every server (the
paper's rotating KV caches), keep all of them busy: the token of one lane travels while those of others are computed.

Each lane is a thread with a session and a random state of its own; all share one compute lock. A lane gets the
caller's arguments with its own sequences. Arguments that cannot be divided without changing the result are refused
before anything is computed. `InferenceLanes` are lanes for a loop of the caller's own.
"""

from __future__ import annotations

import contextvars
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from swarm.client.session import InferenceSession
from swarm.client.threads.compute_lock import ComputeLock, ComputeTicket, RandomState
from swarm.errors import CacheFull, InvalidOption, SessionClosed, UsageError
from swarm.models.images import PromptImages

T = TypeVar("T")

LaneCount = int | Literal["auto"]
"""A number of lanes, or "auto" for one a stage."""

MAX_LANES = 256
"""Most lanes of one call: each is a thread at this client and a session at every server."""

PROMPT_ARGUMENTS = ("inputs", "input_ids", "inputs_embeds")
"""Arguments that may hold the prompt; the first one that is given counts."""

BATCHED_ARGUMENTS = (
    *PROMPT_ARGUMENTS,
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "prompt_images",
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

GenerateFunction = Callable[[dict[str, Any], ComputeTicket | None], Any]
"""Runs transformers' `generate` with these arguments, inside the ticket if there is one."""


def validate_lane_count(lanes: LaneCount) -> None:
    """Raise `InvalidOption` if `lanes` is not a valid number of lanes."""
    if lanes == "auto":
        return
    if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= MAX_LANES:
        raise InvalidOption(f'lanes={lanes!r} is neither "auto" nor a number from 1 to {MAX_LANES}')


def choose_lane_count(lanes: LaneCount, sequences: int, stages: int) -> int:
    """How many lanes a batch of `sequences` sequences is divided into.

    Args:
        lanes: the number asked for, or "auto": one lane for each stage, so that no stage waits if all are equally fast.
        stages: servers of the route, and one more if this client computes the first blocks itself.
    """
    return max(1, min(stages if lanes == "auto" else lanes, sequences, MAX_LANES))


def split_sequences(sequences: int, lanes: int) -> list[slice]:
    """Contiguous groups of sequences, in order, whose sizes differ by at most one; at least one sequence a lane."""
    size, larger = divmod(sequences, lanes)
    edges = [lane * size + min(lane, larger) for lane in range(lanes + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


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
    is_divisible = name in BATCHED_ARGUMENTS and isinstance(value, (torch.Tensor, PromptImages))
    return is_divisible and len(value) == sequences


def _copy_for_lane(one: Any) -> Any:
    """A copy of transformers' own objects, which may keep state between calls, such as the time of the first."""
    return copy.deepcopy(one) if _is_of_transformers(one) else one


def _is_of_transformers(one: Any) -> bool:
    return type(one).__module__.partition(".")[0] == "transformers"


def _optional_int(token: Any) -> int | None:
    return None if token is None else int(token)


def _shift_batch_index(first: int, allowed: Callable[[int, torch.Tensor], list[int]]) -> Callable[..., list[int]]:
    return lambda index, tokens: allowed(first + index, tokens)


def merge_outputs(outputs: Sequence[Any], parts: Sequence[slice], plan: LanePlan) -> Any:
    """One output for all lanes, with the sequences in their original order.

    Shorter sequences are padded as transformers pads a text that has ended. Scores after the end of a lane give all
    weight to the padding. `past_key_values` is None: the lanes' caches are gone.

    Args:
        outputs: of each lane: token ids `[sequences, length]`, or what transformers returns with
            `return_dict_in_generate`.
        parts: which sequences of the batch each lane has.
        plan: what the lanes have in common.
    """
    if isinstance(outputs[0], torch.Tensor):
        return _concatenate(outputs, plan.fill_token)
    fields: dict[str, Any] = {"sequences": _concatenate([one.sequences for one in outputs], plan.fill_token)}
    for name in ("scores", "logits"):
        if outputs[0].get(name) is not None:
            fields[name] = _merge_steps([one[name] for one in outputs], plan.fill_token)
    if outputs[0].get("sequences_scores") is not None:
        fields["sequences_scores"] = torch.cat([one["sequences_scores"] for one in outputs])
    if outputs[0].get("beam_indices") is not None:
        fields["beam_indices"] = _concatenate(
            [
                _shift_beam_indices(one["beam_indices"], part.start * plan.num_beams)
                for one, part in zip(outputs, parts, strict=True)
            ],
            -1,
        )
    return type(outputs[0])(**fields)


def _concatenate(outputs: Sequence[torch.Tensor], fill: int | None) -> torch.Tensor:
    """Concatenate `[sequences, length]` of all lanes, padded to the longest."""
    length = max(output.shape[1] for output in outputs)
    return torch.cat([_pad(output, length, fill) if output.shape[1] < length else output for output in outputs])


def _pad(output: torch.Tensor, length: int, fill: int | None) -> torch.Tensor:
    assert fill is not None, "plan_lanes refuses lanes of different lengths without a fill token"
    return torch.cat([output, output.new_full((output.shape[0], length - output.shape[1]), fill)], dim=1)


def _merge_steps(lanes: Sequence[tuple[torch.Tensor, ...]], fill: int | None) -> tuple[torch.Tensor, ...]:
    """The scores `[sequences, vocabulary]` of each step, of all lanes."""
    steps = max(len(lane) for lane in lanes)
    return tuple(
        torch.cat([lane[step] if step < len(lane) else _scores_after_end(lane[0], fill) for lane in lanes])
        for step in range(steps)
    )


def _scores_after_end(like: torch.Tensor, fill: int | None) -> torch.Tensor:
    scores = torch.full_like(like, -torch.inf)
    if fill is not None and fill >= 0:
        scores[:, fill] = 0
    return scores


def _shift_beam_indices(indices: torch.Tensor, first: int) -> torch.Tensor:
    """Beam indices count the beams of the whole batch; -1 follows the end of a text."""
    return torch.where(indices >= 0, indices + first, indices)


def generate_in_lanes(model: Any, lanes: LaneCount, arguments: Mapping[str, Any], generate: GenerateFunction) -> Any:
    """Run one `generate` call with its sequences divided among lanes.

    The random states of the lanes derive from the caller's generator, which advances by one draw.

    Args:
        model: the distributed model.
        lanes: how many lanes at most.
        arguments: of transformers' `generate`, by name.
        generate: runs the part of one lane.

    Raises:
        UsageError: the arguments cannot be divided; see `lane_arguments`.
        CacheFull: the servers do not have enough free cache for so many lanes.
    """
    validate_lane_count(lanes)
    sequences = batch_size(arguments)
    count = 1
    if sequences > 1:
        count = choose_lane_count(lanes, sequences, model.swarm.stage_count() if lanes == "auto" else 1)
    if count == 1:
        return generate(dict(arguments), None)
    plan = plan_lanes(model, arguments)
    parts = split_sequences(sequences, count)
    seeds = torch.randint(2**62, (count,), device=model.device).tolist()
    randoms = [RandomState(model.device, seed) for seed in seeds]
    callers_random = RandomState(model.device)
    try:
        works = [partial(generate, lane_arguments(arguments, plan, part)) for part in parts]
        return merge_outputs(run_lanes(works, randoms), parts, plan)
    except CacheFull as error:
        raise explain_cache_full(error, count) from error
    finally:
        callers_random.restore()


def explain_cache_full(error: CacheFull, lanes: int) -> CacheFull:
    """The servers' refusal with advice on what to do."""
    return CacheFull(f"{error} ({lanes} lanes are open at every server at once; fewer lanes or rows need less)")


def run_lanes(works: Sequence[Callable[[ComputeTicket], T]], randoms: Sequence[RandomState]) -> list[T]:
    """The results of `works`; each runs in its own thread and computes inside the ticket that it gets.

    The first error, or an interruption of the calling thread, cancels all lanes at their next wait. It is raised when
    all lanes have ended.
    """
    lock = ComputeLock()
    tickets = [ComputeTicket(lock, random) for random in randoms]
    with ThreadPoolExecutor(len(works), thread_name_prefix="swarm-lane") as executor:
        try:
            futures = [
                executor.submit(contextvars.copy_context().run, work, ticket)
                for work, ticket in zip(works, tickets, strict=True)
            ]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
    return [future.result() for future in futures]


class Lane:
    """One of several sessions: its steps run in order, at the same time as the steps of other lanes.

    Args:
        session: the lane's own session; its position may be set back between steps.
        lock: shared by the lanes.
        lanes: how many lanes there are, for the error message when the servers' caches are full.
    """

    def __init__(self, session: InferenceSession, lock: ComputeLock, lanes: int) -> None:
        self.session = session
        self._ticket = ComputeTicket(lock)
        self._lanes = lanes
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="swarm-lane")
        self._closed = False

    def submit(self, hidden: torch.Tensor) -> Future[torch.Tensor]:
        """Start `session.step(hidden)` and return at once; the future gets its result or its error.

        The steps of a lane run in the order in which they were submitted.
        """
        if self._closed:
            raise SessionClosed("this lane is closed; open other ones")
        return self._worker.submit(self._step, hidden)

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run `session.step(hidden)` after all steps that were submitted before."""
        return self.submit(hidden).result()

    def cancel(self) -> None:
        """Cancel the running step and those submitted after it; the lane takes no more steps."""
        self._closed = True
        self._ticket.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Free the session on all servers. A closed lane cannot be used again."""
        self.cancel()
        self._worker.shutdown()
        self.session.close()

    def _step(self, hidden: torch.Tensor) -> torch.Tensor:
        try:
            with self._ticket:
                return self.session.step(hidden)
        except CacheFull as error:
            raise explain_cache_full(error, self._lanes) from error


class InferenceLanes(tuple[Lane, ...]):
    """The lanes of one model; a context manager that closes them all.

    Lanes are independent: an error of one lane, or a server that it loses, does not affect the others.
    """

    def __new__(cls, sessions: Sequence[InferenceSession]) -> InferenceLanes:
        lock = ComputeLock()
        return super().__new__(cls, (Lane(session, lock, len(sessions)) for session in sessions))

    def close(self) -> None:
        """Close all sessions. Running steps are cancelled."""
        for lane in self:
            lane.cancel()
        for lane in self:
            lane.close()

    def __enter__(self) -> InferenceLanes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
