"""Texts of the demo model with planted drafts, over servers that are far apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common.links import Profile
from benchmarks.common.report import Report
from benchmarks.common.shapes import split_blocks
from benchmarks.common.slow_network import slow_network
from benchmarks.wide_area.planted import PlantedDraft
from swarm.client.routes.events import HopLost, PeerAvoided
from swarm.client.speculation.guess_policy import GuessPolicy
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer

DEMO_BLOCKS = 12
PROMPT = "Once upon a time"
PLAIN_TOKENS = 40
"""Of texts that take long."""


class PlantedTexts:
    """Writes the same text again and again, and compares it with the local model's.

    Args:
        model: the demo model, distributed.
        tokens: of the text.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self._model, self._tokens = model, tokens
        self._prompt_1T: torch.Tensor = load_tokenizer(DEMO_FOLDER)(PROMPT, return_tensors="pt").input_ids
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        self._expected_1T = load_local_model(DEMO_FOLDER).generate(self._prompt_1T, **settings)
        self._truth = [*self._expected_1T[0].tolist(), *[0] * 64]

    def write(
        self, right: float | None, seed: int, listener: Callable[[Any], object], in_blocks: bool = False
    ) -> float:
        """Tokens per second behind the prompt.

        Args:
            right: how often the draft is; None for no draft.
            seed: of when it is right.
            listener: of the session.
            in_blocks: guesses go in one step, and others when it is answered: speculation that does not stream.
        """
        new = self._tokens if right is not None and right > 0 else min(self._tokens, PLAIN_TOKENS)
        draft = [lambda: PlantedDraft(right, seed, self._truth.__getitem__, 256)] if right is not None else ()
        settings = {"max_new_tokens": new - 1, "min_new_tokens": new - 1, "do_sample": False}
        length = self._prompt_1T.shape[1] + new
        one_step = mock.patch.object(GuessPolicy, "useful_steps", 1) if in_blocks else nullcontext()
        with self._model.inference_session(max_length=length, listener=listener), one_step:
            begun_1T = self._model.generate(self._prompt_1T, max_new_tokens=1, do_sample=False)
            began = time.perf_counter()
            text_1T = self._model.generate(begun_1T, draft=draft, **settings)
            seconds = time.perf_counter() - began
        if not text_1T.equal(self._expected_1T[:, :length]):
            raise SystemExit(f"with a draft that is right with probability {right}, the tokens differ")
        return (new - 1) / seconds


class _Trouble:
    """Counts what servers are blamed for."""

    def __init__(self) -> None:
        self.lost, self.avoided = list[str](), list[str]()

    def __call__(self, event: Any) -> None:
        if isinstance(event, HopLost):
            self.lost.append(event.reason)
        elif isinstance(event, PeerAvoided):
            self.avoided.append(event.reason)


def over_profile(report: Report, path: Path, right: float, tokens: int) -> None:
    """Measure texts over the links of a profile: without a draft, with guesses in blocks, and with guesses that stream.

    Args:
        right: how often the draft is.
    """
    profile = Profile.read(path)
    ways: dict[str, tuple[float | None, bool]] = {
        "plain": (None, False),
        "in blocks": (right, True),
        "streaming": (right, False),
    }
    trouble = {way: _Trouble() for way in ways}
    with slow_network(DEMO_FOLDER, split_blocks(DEMO_BLOCKS, len(profile.machines) - 1), path.resolve()) as model:
        texts = PlantedTexts(model, tokens)
        for seed in report.rounds(f"{profile.name}, right with {right:g}"):
            rates = {way: texts.write(draft, seed, trouble[way], in_blocks) for way, (draft, in_blocks) in ways.items()}
            for way, rate in rates.items():
                report.add(f"{way}, tokens/s", rate, "more")
                if way != "plain":
                    report.add(f"{way}, times plain", rate / rates["plain"], "more", decides=True)
    for way, found in trouble.items():
        if found.lost or found.avoided:
            lost, avoided = (", ".join(reasons) or "none" for reasons in (found.lost, found.avoided))
            report.note(f"{profile.name}, {way}: servers replaced: {lost}; kept out of routes: {avoided}")
