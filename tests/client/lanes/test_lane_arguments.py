"""How many lanes there are, what each gets of the caller's arguments, and how their outputs are merged."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import EncoderRepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from swarm.client.lanes.generate_in_lanes import (
    MAX_LANES,
    LanePlan,
    choose_lane_count,
    lane_arguments,
    merge_outputs,
    plan_lanes,
    split_sequences,
    validate_lane_count,
)
from swarm.errors import InvalidOption, UsageError
from tests import zoo

IDS = torch.arange(3, 23).view(4, 5)
MASK = torch.ones_like(IDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Any transformers model: what is asked of it is how it reads its settings."""
    folder: Path = zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))
    return AutoModelForCausalLM.from_pretrained(folder)


def by_rows(*args: Any) -> None:
    """A function that says it treats every row by itself."""


by_rows.row_by_row = True  # type: ignore[attr-defined]


def test_rows_are_divided_and_settings_are_not(model: Any) -> None:
    arguments = {
        "input_ids": IDS,
        "attention_mask": MASK,
        "position_ids": torch.arange(5).unsqueeze(0),
        "negative_prompt_ids": IDS + 1,
        "max_new_tokens": 4,
        "eos_token_id": [7, 8],
        "pad_token_id": 0,
    }
    made = plan_lanes(model, arguments)
    assert made.sequences == 4
    lane = lane_arguments(arguments, made, slice(1, 3))
    assert lane["input_ids"].tolist() == IDS[1:3].tolist()
    assert lane["attention_mask"].shape == lane["negative_prompt_ids"].shape == (2, 5)
    assert lane["position_ids"].shape == (1, 5)  # one for all rows
    assert lane["eos_token_id"] == [7, 8]
    assert lane["max_new_tokens"] == 4


def test_which_token_fills_a_text_that_has_ended(model: Any) -> None:
    for settings, fill in [
        ({"pad_token_id": 0, "eos_token_id": 5}, 0),
        ({"pad_token_id": None, "eos_token_id": [5, 6]}, 5),
        ({"pad_token_id": 2, "eos_token_id": None}, 2),
        ({"pad_token_id": None, "eos_token_id": None}, None),
        ({"pad_token_id": 2, "eos_token_id": 5, "num_beams": 2}, 2),
        ({"pad_token_id": 0, "eos_token_id": 5, "num_beams": 2}, 5),  # as transformers' beam search does
        ({"pad_token_id": 0, "eos_token_id": None, "num_beams": 2}, -1),
    ]:
        config = GenerationConfig(**settings)
        stored, model.generation_config = model.generation_config, config
        try:
            assert plan_lanes(model, {"input_ids": IDS, "generation_config": config}).fill_token == fill
        finally:
            model.generation_config = stored


def test_what_lanes_cannot_do_is_refused(model: Any) -> None:
    for arguments, why in [
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"streamer": BaseStreamer()}, "streamer"),
        ({"custom_generate": by_rows}, "custom_generate"),
        ({"stopping_criteria": StoppingCriteriaList([lambda ids, scores: None])}, "row_by_row = True"),
        ({"logits_processor": LogitsProcessorList([lambda ids, scores: scores])}, "row_by_row = True"),
        (
            {"logits_processor": LogitsProcessorList([EncoderRepetitionPenaltyLogitsProcessor(1.2, IDS)])},
            "made for the whole batch",
        ),
        ({"attention_mask": MASK[:3]}, r"attention_mask has the shape \[3, 5\], but the batch has 4 rows"),
        ({"cache_position": torch.arange(4)}, "cache_position"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"max_time": 1.0, "pad_token_id": None, "eos_token_id": None}, "pad_token_id"),
    ]:
        stored = model.generation_config
        model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=None)
        try:
            with pytest.raises(UsageError, match=why):
                plan_lanes(model, {"input_ids": IDS, "pad_token_id": 0, "max_new_tokens": 2, **arguments})
        finally:
            model.generation_config = stored


def test_processors_and_criteria_are_taken_if_they_treat_each_row_by_itself(model: Any) -> None:
    arguments = {
        "input_ids": IDS,
        "pad_token_id": 0,
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(9), MaxTimeCriteria(60.0), by_rows]),
        "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
    }
    made = plan_lanes(model, arguments)
    one, other = lane_arguments(arguments, made, slice(0, 2)), lane_arguments(arguments, made, slice(2, 4))
    assert isinstance(one["stopping_criteria"], StoppingCriteriaList)
    # transformers' own may remember something, so each lane has a copy; what a person wrote is called as it is.
    assert one["stopping_criteria"][1] is not other["stopping_criteria"][1]
    assert one["stopping_criteria"][2] is other["stopping_criteria"][2] is by_rows
    assert one["logits_processor"][0].temperature == 0.5


@pytest.mark.parametrize(("settings", "first"), [({"num_beams": 3}, 2), ({"num_return_sequences": 3}, 6), ({}, 2)])
def test_allowed_tokens_are_asked_for_by_the_number_of_the_whole_batch(
    model: Any, settings: dict[str, Any], first: int
) -> None:
    asked: list[int] = []

    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        asked.append(row)
        return [1]

    arguments = {"input_ids": IDS, "prefix_allowed_tokens_fn": allowed, "do_sample": True, **settings}
    lane = lane_arguments(arguments, plan_lanes(model, arguments), slice(2, 4))
    assert lane["prefix_allowed_tokens_fn"](1, IDS) == [1]
    assert asked == [first + 1]


@given(st.integers(1, 500), st.integers(1, MAX_LANES))
def test_every_row_is_in_one_lane_in_order_and_lanes_are_nearly_equal(rows: int, wanted: int) -> None:
    lanes = choose_lane_count(wanted, rows, 1)
    parts = split_sequences(rows, lanes)
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in parts]
    assert len(sizes) == lanes
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_invalid_lane_counts_are_refused() -> None:
    for wanted in [0, -1, MAX_LANES + 1, "many", 2.0, True, None]:
        with pytest.raises(InvalidOption, match="neither"):
            validate_lane_count(wanted)  # type: ignore[arg-type]


PLAN = LanePlan(sequences=3, num_beams=1, num_return_sequences=1, pad=9, eos=1)
INF = float("inf")


def parts(*edges: int) -> list[slice]:
    return [slice(*edge) for edge in pairwise(edges)]


def test_lanes_that_end_early_are_filled_up() -> None:
    lanes = [torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7, 8]])]
    assert merge_outputs(lanes, parts(0, 2, 3), PLAN).tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_scores_after_the_end_of_a_lane_choose_the_fill_token() -> None:
    plan = LanePlan(sequences=2, num_beams=1, num_return_sequences=1, pad=2, eos=1)
    long = GenerateDecoderOnlyOutput(
        sequences=torch.tensor([[5, 0, 1]]), scores=(torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[0.0, 4.0, 0.0]]))
    )
    short = GenerateDecoderOnlyOutput(sequences=torch.tensor([[6, 1]]), scores=(torch.tensor([[0.0, 2.0, 0.0]]),))
    result = merge_outputs([long, short], parts(0, 1, 2), plan)
    assert isinstance(result, GenerateDecoderOnlyOutput)
    assert result.sequences.tolist() == [[5, 0, 1], [6, 1, 2]]
    assert [step.tolist() for step in result.scores] == [
        [[3.0, 1.0, 0.0], [0.0, 2.0, 0.0]],
        [[0.0, 4.0, 0.0], [-INF, -INF, 0.0]],
    ]
    assert result.logits is None
    assert result.past_key_values is None


def test_beams_are_counted_through_the_whole_batch() -> None:
    plan = LanePlan(sequences=3, num_beams=2, num_return_sequences=1, pad=None, eos=None)
    lanes = [
        GenerateBeamDecoderOnlyOutput(
            sequences=torch.tensor([[5, 6, 7], [8, 9, 9]]),
            sequences_scores=torch.tensor([-1.0, -2.0]),
            scores=(torch.zeros(4, 10), torch.zeros(4, 10)),
            beam_indices=torch.tensor([[0, 1], [2, 3]]),
        ),
        GenerateBeamDecoderOnlyOutput(
            sequences=torch.tensor([[4, 3]]),
            sequences_scores=torch.tensor([-3.0]),
            scores=(torch.ones(2, 10),),
            beam_indices=torch.tensor([[1]]),
        ),
    ]
    result = merge_outputs(lanes, parts(0, 2, 3), plan)
    assert result.sequences.tolist() == [[5, 6, 7], [8, 9, 9], [4, 3, -1]]
    assert result.sequences_scores.tolist() == [-1.0, -2.0, -3.0]
    assert result.beam_indices.tolist() == [[0, 1], [2, 3], [5, -1]]
    assert [step.shape for step in result.scores] == [(6, 10), (6, 10)]
    assert result.scores[1][4:].tolist() == [[-INF] * 10] * 2
