"""Hidden states, read where each sequence's token has left."""

from __future__ import annotations

import pytest
import torch

from swarm import EarlyExit
from swarm.client.early_exit.hidden_reader import HiddenReader
from swarm.models.exits.trained_exits import BaseModel, ExitClassifier, ExitLens, TrainedExits

BLOCKS, WIDTH = 6, 3
LENSES = {block: ExitLens(torch.eye(WIDTH) * block, torch.full((WIDTH,), float(block))) for block in (2, 4)}
CLASSIFIERS = {4: ExitClassifier(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(1))}
HIDDEN_R1H = torch.arange(12.0).view(4, 1, WIDTH)


def reader(**options: object) -> HiddenReader:
    exits = TrainedExits(BaseModel("m", "r", WIDTH, BLOCKS), LENSES, CLASSIFIERS)
    return HiddenReader(EarlyExit(**options), exits, lambda hidden_R1H: hidden_R1H[:, -1])


def test_each_sequence_is_read_through_its_own_lens():
    found = reader().logits(HIDDEN_R1H, [2, BLOCKS, 4, 3])
    plain = HIDDEN_R1H[:, 0]
    assert found.equal(torch.stack([2 * plain[0] + 2, plain[1], 4 * plain[2] + 4, plain[3]]))


def test_confidences():
    before = torch.ones(4, WIDTH)
    sure, logits = reader(confidence="similarity").confidence(4, before, HIDDEN_R1H)
    assert logits is None
    assert sure.tolist() == pytest.approx(
        torch.nn.functional.cosine_similarity(before, HIDDEN_R1H[:, 0], dim=-1).tolist()
    )
    sure, logits = reader(confidence="classifier").confidence(4, before, HIDDEN_R1H)
    assert logits is None
    assert sure.equal(torch.sigmoid(HIDDEN_R1H[:, 0, 0]))
    sure, logits = reader().confidence(4, before, HIDDEN_R1H)
    assert logits.equal(4 * HIDDEN_R1H[:, 0] + 4)
    top = logits.softmax(-1).topk(2).values
    assert sure.equal(top[:, 0] - top[:, 1])


def test_a_block_without_a_classifier():
    before = torch.ones(4, WIDTH)
    # After a failover, servers may begin elsewhere; with fill="project" they have classifiers of their own.
    for options in ({}, {"fill": "project", "verify": False}):
        one = reader(confidence="classifier", **options)
        assert one.confidence(2, before, HIDDEN_R1H)[0].equal(torch.zeros(4))
        assert one.confidence(4, before, HIDDEN_R1H)[0].equal(torch.sigmoid(HIDDEN_R1H[:, 0, 0]))
