"""What lanes have written, put together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from swarm.client.lanes.generate_in_lanes import LanePlan, merge_outputs

PLAN = LanePlan(sequences=3, num_beams=1, num_return_sequences=1, pad=9, eos=1)
INF = float("inf")


def parts(*edges: int) -> list[slice]:
    return [slice(*edge) for edge in pairwise(edges)]


def test_lanes_that_end_early_are_filled_up() -> None:
    lanes = [torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7, 8]])]
    assert merge_outputs(lanes, parts(0, 2, 3), PLAN).tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_scores_of_a_lane_that_has_ended_are_all_for_the_filling() -> None:
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


@pytest.mark.parametrize("fill", [None, 0])
def test_lanes_of_one_length_need_no_filling(fill: int | None) -> None:
    plan = LanePlan(sequences=2, num_beams=1, num_return_sequences=1, pad=fill, eos=None)
    assert merge_outputs([torch.tensor([[1, 2]]), torch.tensor([[3, 4]])], parts(0, 1, 2), plan).tolist() == [
        [1, 2],
        [3, 4],
    ]
