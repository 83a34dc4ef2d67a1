"""Images in a prompt are computed as the whole wrapper does it, by a tower at the client and blocks in three spans."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.errors import CheckpointError
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.cutting.families import IMAGES
from swarm.models.images import ImageTower
from tests import wrappers
from tests.models.test_wrappers import Chain, Mixin, change_config

torch.set_num_threads(1)

KINDS = [kind for kind in wrappers.TABLE if kind.partition(" ")[0] in IMAGES]


@torch.no_grad()
def check(kind, folder, whole):
    """Two images, one in the middle of the text."""
    picture = wrappers.picture_tokens(kind)
    tokens = torch.tensor([[5, 6, *picture, 7, 8, 9, *picture, 10]])
    images = wrappers.pictures(kind, 1, 2, 3)
    checkpoint = open_checkpoint(folder)
    model = load_blockless_model(checkpoint, Chain(folder), Mixin, dtype=torch.float32).model.eval()
    prompt = ImageTower(checkpoint, model, torch.float32).take(tokens, {**images})
    expected = whole(input_ids=tokens, **images).logits
    found = model(inputs_embeds=prompt.hidden).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (expected - whole(input_ids=tokens, **wrappers.pictures(kind, 1, 2, 4)).logits).abs().max() > 1e-2
    assert (prompt.marks < 0).equal(tokens == wrappers.IMAGE)


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_computed_as_the_wrapper_does(kind, tmp_path):
    model = wrappers.make_wrapper(kind)
    check(kind, wrappers.save(model, tmp_path), model)


@pytest.mark.parametrize("names", wrappers.NAMES[:2])
def test_names_of_published_forms(names, tmp_path):
    model = wrappers.make_wrapper("llava")
    check("llava", wrappers.save(model, tmp_path, names), model)


@pytest.mark.parametrize(
    ("tower", "kept", "words"),
    [
        ({"pos_emb_time": 1 << 30}, "", "computes [0-9]+ values for its positions"),
        ({"hidden_size": 1 << 19}, "", "holds [0-9]+ for them|do not fit|has the shape"),
        ({"num_attention_heads": 0}, "", "no tower can be built|do not fit"),
        ({}, "language_model", "the language model only. Load the model from the hub"),
        ({}, "language_model|projector", "lacks [0-9]+ tensors that the model needs"),
    ],
)
def test_towers_that_do_not_fit_their_config_are_refused(tower, kept, words, tmp_path):
    (file,) = wrappers.save(wrappers.make_wrapper("kimi_k25"), tmp_path).glob("*.safetensors")
    change_config(tmp_path, vision_config=json.loads((tmp_path / "config.json").read_text())["vision_config"] | tower)
    tensors = {name: one for name, one in load_file(file).items() if re.search(kept, name) or "lm_head" in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        ImageTower(open_checkpoint(tmp_path), None, torch.float32).take(torch.tensor([[5]]), {})
