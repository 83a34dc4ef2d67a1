"""Tokens leave inside the spans of real servers, as they do where the same spans are computed in one process."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm import EarlyExit
from swarm.client.routes.events import ExitTaken
from swarm.data_structures import ExitConfidence, Span, StepLayout
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_pass import StepExits
from swarm.models.exits.model_head import ModelHead
from swarm.models.exits.span_exits import SpanExits
from swarm.models.loading.span_loading import load_span
from swarm.protocol.messages import ExitTerms
from swarm.server.config import ExitsOption
from tests import zoo
from tests.swarms import run_client, run_swarm

SPANS = (Span(0, 4), Span(4, 6))
EXITS = (2, 4, 5)
TOKENS = 12


class Local:
    """The same spans without a swarm: greedy texts of one sequence, and where its tokens left."""

    def __init__(self, folder) -> None:
        checkpoint = open_checkpoint(folder)
        cpu = torch.device("cpu")
        self.embed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_input_embeddings()
        self.head = ModelHead(checkpoint, torch.float32, cpu)
        self.models = []
        for span in SPANS:
            model = load_span(checkpoint, span, dtype=torch.float32, device=cpu)
            blocks = tuple(block for block in EXITS if span.start < block <= span.end)
            self.models.append(model.with_exits(SpanExits(blocks, self.head)))

    @torch.no_grad()
    def generate(self, prompt: list[int], confidence: ExitConfidence, threshold: float) -> tuple[list[int], list[int]]:
        caches = [SessionCache(model) for model in self.models]
        terms = ExitTerms(confidence, tuple((block, threshold) for block in EXITS))
        text, places, hidden = list(prompt), [], self.embed(torch.tensor(prompt))
        for number in range(TOKENS):
            exits = StepExits(terms, (0,)) if number else None
            layout = StepLayout((caches[0].lengths or (0,)), (len(hidden),))
            for cache in caches:
                step = cache.start_step(hidden, layout, exits)
                advance_steps([(step, len(hidden))])
                step.commit()
                hidden, exits = step.output, step.exits
            places += [block for block in (exits.left if exits is not None else ()) if block]
            text.append(int(self.head(hidden[-1:]).argmax()))
            hidden = self.embed(torch.tensor(text[-1:]))
        return text, places


@pytest.mark.slow
def test_texts_are_those_of_the_same_spans_in_one_process(tmp_path):
    folder = zoo.make_checkpoint("llama", tmp_path / "model")
    local = Local(folder)
    prompt = list(zoo.PROMPTS[0])
    some: list[int] = []
    with (
        run_swarm(folder, [str(span) for span in SPANS], exits=ExitsOption(EXITS)) as swarm,
        run_client(swarm) as model,
    ):
        for confidence, threshold in (("similarity", 0.5), ("similarity", 0.8), ("softmax", 0.0), ("softmax", 0.3)):
            text, places = local.generate(prompt, confidence, threshold)
            events: list[ExitTaken] = []
            with model.inference_session(max_length=64, listener=events.append):
                found = model.generate(
                    torch.tensor([prompt]),
                    max_new_tokens=TOKENS,
                    do_sample=False,
                    early_exit=EarlyExit(confidence, threshold, verify=False, fill="project"),
                )
            assert found[0].tolist() == text
            assert [event.block for event in events if isinstance(event, ExitTaken)] == places
            some += places
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
        assert plain[0].tolist() == local.generate(prompt, "similarity", 1.0)[0]
    assert {2, 4} <= set(some)
