"""Images through `generate`, over three real servers: texts are those of transformers' own load of the same files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, StoppingCriteriaList

from swarm import EarlyExit
from swarm.errors import UnsupportedModel, UsageError
from swarm.models.cutting.families import IMAGES
from tests import wrappers, zoo
from tests.client.prompts import PAD
from tests.disturbances import Before, holder
from tests.slow import slow_except
from tests.swarms import run_client, run_swarm

SPANS = ("0:2", "2:3", "2:3", "3:6")
NEW = 12
SETTINGS: dict[str, Any] = {
    **{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, "suppress_tokens": [wrappers.IMAGE]}
}
KINDS = [kind for kind in wrappers.TABLE if kind.partition(" ")[0] in IMAGES]


def one_row(kind: str, seed: int = 3, tail: tuple[int, ...] = (10,)) -> dict[str, torch.Tensor]:
    """A text with two images, one of them in its middle."""
    picture = wrappers.picture_tokens(kind)
    tokens = torch.tensor([[5, 6, *picture, 7, 8, 9, *picture, *tail]])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **wrappers.pictures(kind, 1, 2, seed)}


def text_only(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def padded(kind: str) -> dict[str, torch.Tensor]:
    """Two texts of different lengths with an image each."""
    picture = wrappers.picture_tokens(kind)
    tokens = torch.tensor([[PAD, PAD, PAD, 11, *picture, 12], [5, 6, *picture, 7, 8, 9]])
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), **wrappers.pictures(kind, 2, 1, 5)}


@pytest.mark.parametrize("kind", slow_except(KINDS, "mistral3", "llama4"))
def test_texts_about_images_are_those_of_transformers(kind, tmp_path, monkeypatch):
    folder = wrappers.save(wrappers.make_wrapper(kind), tmp_path / "model")
    local = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    def known(inputs: dict[str, torch.Tensor], **more: Any) -> list[list[int]]:
        texts: torch.Tensor = local.generate(**inputs, **SETTINGS, **more)
        assert all(row.unique().numel() >= 4 for row in texts[:, -NEW:]), "text that does not vary proves nothing"
        return texts.tolist()

    prompt, others = one_row(kind), one_row(kind, seed=4)
    text, batch = known(prompt), known(padded(kind))
    assert text != known(others)
    with run_swarm(folder, SPANS, dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        assert model.generate(**prompt, **SETTINGS).tolist() == text
        assert model.generate(**padded(kind), **SETTINGS).tolist() == batch
        if kind != "llama4":  # it counts padding as text; and transformers does not repeat its images for beams
            assert model.generate(**padded(kind), **SETTINGS, lanes=2).tolist() == batch
            beams = known(prompt, num_beams=3)
            assert model.generate(**prompt, **SETTINGS, num_beams=3).tolist() == beams
        early = EarlyExit(threshold=0.0, batch="all")
        assert model.generate(**padded(kind), **SETTINGS, early_exit=early).tolist() == batch
        draft = zoo.make_model("llama")  # whose guesses are often wrong
        assert model.generate(**prompt, **SETTINGS, assistant_model=draft).tolist() == text
        with model.inference_session(max_length=100) as session:
            assert model.generate(**prompt, **SETTINGS).tolist() == text
            computed, steps = session.compute, []
            monkeypatch.setattr(
                session, "compute", lambda one, *more: steps.append(one.shape[1]) or computed(one, *more)
            )
            longer = one_row(kind, tail=(*text[0][prompt["input_ids"].shape[1] - 1 :], 20, 21))
            assert model.generate(**longer, **SETTINGS).tolist() == known(longer)
            assert steps[0] == 3, "what is held of the images and the text is not computed again"
            # Their tokens are those of the first prompt, and their images are not.
            before = Before(session, {5: lambda session: holder(swarm, session, 2).kill()})
            criteria = StoppingCriteriaList([before])
            assert model.generate(**others, **SETTINGS, stopping_criteria=criteria).tolist() == known(others)
        with run_client(swarm, dtype="bfloat16") as half:  # and pixels in float32, as processors make them
            seen = half.prompt_images(**{name: one for name, one in prompt.items() if name != "attention_mask"})
            assert half.generate(**text_only(prompt), **SETTINGS, prompt_images=seen).shape[1] == len(text[0])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gemma3", "texts of 'gemma3' are served, images are not: the tokens of an image see those behind them"),
        (
            "qwen3_vl",
            "positions of three numbers .*, and some blocks get features of images as well.* such as mistral3",
        ),
        (None, "a model of the family 'llama' takes no images"),
    ],
)
def test_images_that_are_refused(kind, words, tmp_path):
    if kind is None:
        zoo.make_checkpoint("llama", tmp_path / "model")
    else:
        wrappers.save(wrappers.make_wrapper(kind), tmp_path / "model")
    with run_swarm(tmp_path / "model", ("0:6",), dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        tokens, pixels = torch.tensor([[5, 6, 7]]), torch.zeros(1, 3, 28, 28)
        with pytest.raises(UnsupportedModel, match=words):
            model.generate(tokens, pixel_values=pixels, max_new_tokens=2)
        with pytest.raises(UsageError, match="images are taken by"):
            model(tokens, pixel_values=pixels)
        assert model.generate(tokens, max_new_tokens=2, pad_token_id=PAD).shape == (1, 5)
