"""Layers with a state: whatever a session does, its outputs are those of its texts computed in one piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span, StepLayout
from swarm.errors import WrongPosition
from swarm.models.attention import sequence_states
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.cutting.model_inspection import inspect_model
from swarm.models.execution.session_cache import SessionCache, advance_steps, forward_without_cache
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from tests import zoo

torch.set_num_threads(1)

FAMILIES = ("qwen3_5_text", "jamba", "lfm2", "mamba", "mamba2", "falcon_mamba")
"""Recurrent states and convolutions; states that several tokens cannot continue; convolutions alone; states alone."""

TOLERANCE = 1e-3
POOL = torch.randn(64, zoo.COMMON["hidden_size"], generator=torch.Generator().manual_seed(0))
"""Hidden states that texts are made of."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpanModel:
    folder = zoo.make_checkpoint(request.param, tmp_path_factory.mktemp("states") / request.param)
    return load(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> SpanModel:
    return load_span(open_checkpoint(folder), Span(1, 4), dtype=dtype, device=torch.device("cpu"))


def in_one_piece(model: SpanModel, text: list[int]) -> torch.Tensor:
    return model.forward(POOL[text].unsqueeze(0))[0]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).norm() <= TOLERANCE * expected.norm()


class Session:
    """A session's cache and the texts that it has seen, one for each sequence."""

    def __init__(self, model: SpanModel) -> None:
        self.model = model
        self.cache = SessionCache(model)
        self.texts: list[list[int]] = []

    def begin(self, starts: list[int], new: list[list[int]], sources: list[int] | None = None):
        layout = StepLayout(tuple(starts), tuple(map(len, new)), tuple(sources) if sources is not None else None)
        tokens = [token for one in new for token in one]
        step = self.cache.start_step(POOL[tokens], layout)
        before = [self.texts[one] if one < len(self.texts) else [] for one in (sources or range(len(new)))]
        texts = [text[:start] + one for text, start, one in zip(before, starts, new, strict=True)]
        return step, texts

    def end(self, step, texts: list[list[int]], new: list[list[int]]) -> None:
        step.commit()
        self.texts = texts
        for text, one, output in zip(texts, new, step.output.split([len(one) for one in new]), strict=True):
            if one:
                assert_same(output, in_one_piece(self.model, text)[-len(one) :])

    def step(self, starts: list[int], new: list[list[int]], sources: list[int] | None = None) -> None:
        step, texts = self.begin(starts, new, sources)
        while step.tokens_left:
            advance_steps([(step, min(step.tokens_left, 4))])
        self.end(step, texts, new)


TOKENS = st.integers(0, len(POOL) - 1)
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 6), st.lists(TOKENS, max_size=5)), min_size=2, max_size=2),
        st.sampled_from(["commit", "commit", "commit", "fail", "swap"]),
    ),
    max_size=12,
)


@settings(max_examples=40)
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=2, max_size=2), STEPS)
def test_steps_of_all_kinds(model, prompts, steps):
    """Some go back, some fail half-way, some exchange the sequences."""
    session = Session(model)
    session.step([0, 0], prompts)
    for sequences, what in steps:
        sources = [1, 0] if what == "swap" else [0, 1]
        starts = [
            max(0, session.cache.lengths[source] - back) for source, (back, _) in zip(sources, sequences, strict=True)
        ]
        new = [tokens or [0] for _, tokens in sequences]
        given_sources = sources if what == "swap" else None
        try:
            step, texts = session.begin(starts, new, given_sources)
        except WrongPosition:  # then the client sends all of it again
            whole = [session.texts[source][:start] for source, start in zip(sources, starts, strict=True)]
            session.step([0, 0], [text + one for text, one in zip(whole, new, strict=True)])
            continue
        if what == "fail":
            advance_steps([(step, 1)])
            continue
        while step.tokens_left:
            advance_steps([(step, step.tokens_left)])
        session.end(step, texts, new)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_families_whose_layers_add_up_in_float32(family, tmp_path):
    """Each load compares sessions with texts in one piece."""
    model = load(zoo.make_checkpoint(family, tmp_path), torch.bfloat16)
    assert model.forward(POOL[:2].bfloat16().unsqueeze(0)).dtype == torch.bfloat16


def test_single_tokens_of_many_sessions_are_computed_together(model):
    """And no session keeps the states of others in memory."""
    sessions = [Session(model) for _ in range(3)]
    for number, session in enumerate(sessions):
        session.step([0] * (number + 1), [[number, 5, 9]] * (number + 1))
    for token in (3, 4):
        new = [[[token + number]] * (number + 1) for number in range(3)]
        begun = [
            session.begin([len(session.texts[0])] * len(one), one) for session, one in zip(sessions, new, strict=True)
        ]
        advance_steps([(step, step.tokens_left) for step, _ in begun])
        for session, (step, texts), one in zip(sessions, begun, new, strict=True):
            session.end(step, texts, one)
    for session in sessions:
        for state in session.cache._storage.history._now.states.values():
            assert state.untyped_storage().nbytes() == state.nbytes


def test_a_session_that_goes_back_too_far_is_told_how_far_it_can(model, monkeypatch):
    monkeypatch.setattr(sequence_states, "KEPT_INPUTS", 6)
    monkeypatch.setattr(sequence_states, "POINT_EVERY", 3)
    session = Session(model)
    session.step([0], [list(range(8))])
    for position in range(8, 13):
        session.step([position], [[position]])
    session.step([12], [[50]])
    with pytest.raises(WrongPosition, match=r"position 4, only to positions from (8|9|10|11) on"):
        session.begin([4], [[1]])
    session.step([0], [[1, 2]])


def test_what_a_family_keeps_is_known_before_anything_is_loaded(model):
    session = Session(model)
    session.step([0, 0], [[1, 2, 3]] * 2)
    structure = inspect_model(zoo.config_of(model.family))
    states = session.cache._storage.history._now.states
    store = session.cache._storage.store
    for block in range(model.span.start, model.span.end):
        place = block - model.span.start
        kept = sum(state[0].numel() for (layer, _, _), state in states.items() if layer == place)
        assert structure.state_values[block] == kept
        keys, values = store.layers.get(place, (torch.empty(0, 0, 0, 0),) * 2)
        assert structure.cached_values[block] == sum(one.shape[1] * one.shape[3] for one in (keys, values))
        assert not kept or structure.cached_values[block] == 0


def test_a_forward_without_a_session(model):
    texts = [[1, 2, 3], [4, 5, 6], [7, 8]]
    hidden = POOL[[token for text in texts for token in text]]
    outputs = forward_without_cache(model, hidden, StepLayout((0, 0, 0), (3, 3, 2)))
    for text, output in zip(texts, outputs.split([3, 3, 2]), strict=True):
        assert_same(output, in_one_piece(model, text))


@pytest.mark.parametrize("new", [1, 5])
def test_a_session_begins_with_a_part_of_another(model, new):
    """At its end or a little before. Farther back it cannot."""
    text = [number % len(POOL) for number in range(110)]
    first = Session(model)
    first.step([0], [text[:30]])
    for token in text[30:]:
        first.step([len(first.texts[0])], [[token]])
    for length in (110, 106):
        second = Session(model)
        second.cache.begin_with(first.cache.shared(), length)
        second.texts = [text[:length]]
        second.step([length], [text[:new]])
        second.step([length + new], [text[:1]])
    with pytest.raises(WrongPosition):
        Session(model).cache.begin_with(first.cache, 7)
    first.step([110], [text[:2]])
