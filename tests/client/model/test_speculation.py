"""Speculative decoding over real servers: the tokens are those without guesses, and many are under way at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList, SynthIDTextWatermarkingConfig

from swarm import EarlyExit
from swarm.client.model.speculation import assisted_draft, guess_room
from swarm.client.routes.events import GuessVerified, Replayed
from swarm.client.speculation.drafts import Choose, Context, CopyDraft, Draft, Guess
from swarm.errors import ProcessorsWithState, UsageError
from tests import zoo
from tests.client.conftest import SPANS
from tests.client.prompts import greedy, padded_batch, prompt
from tests.disturbances import Before, holder
from tests.swarms import TestSwarm, run_client, run_swarm

pytestmark = pytest.mark.usefixtures("always_guess")

NEW = 24
SETTINGS = {"pad_token_id": 0, "max_new_tokens": NEW, "min_new_tokens": NEW}


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    """Each span twice."""
    with run_swarm(folder, SPANS * 2, dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm, dtype="float32", wire="none") as model:
        yield model


@pytest.fixture(scope="module")
def poor(folder: Path) -> Any:
    """A draft that is often wrong: the model's own first block."""
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 1
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


def write(model: Any, tokens: torch.Tensor, new: int = NEW, **more: Any) -> list[int]:
    settings = {"do_sample": False, **SETTINGS, "max_new_tokens": new, "min_new_tokens": new, **more}
    return model.generate(tokens, **settings)[0].tolist()  # type: ignore[no-any-return]


def outcomes(model: Any, tokens: torch.Tensor, **more: Any) -> tuple[list[int], list[bool]]:
    """The text, and of each guess whether it stood."""
    events: list[Any] = []
    with model.inference_session(max_length=200, listener=events.append):
        text = write(model, tokens, **more)
    return text, [event.stands for event in events if isinstance(event, GuessVerified)]


def test_right_guesses_stand(model: Any, local: Any) -> None:
    text, stands = outcomes(model, prompt(), draft=local)
    assert text == write(local, prompt())
    assert all(stands)
    assert len(stands) > NEW / 2  # a few may be late, because these servers answer as fast as the draft


def test_wrong_guesses_are_rolled_back(model: Any, local: Any, poor: Any) -> None:
    text, stands = outcomes(model, prompt(), draft=poor)
    assert text == write(local, prompt())
    assert not all(stands)


def test_copies(model: Any, local: Any) -> None:
    few = {"prefix_allowed_tokens_fn": lambda *_: [5, 6]}  # so that the text goes on as it did before
    text, stands = outcomes(model, prompt(), draft="copies", **few)
    assert text == write(local, prompt(), **few)
    assert any(stands)


@pytest.mark.parametrize("how", ["assistant_model", "prompt_lookup_num_tokens"])
def test_transformers_own_arguments(model: Any, local: Any, poor: Any, how: str) -> None:
    tokens = torch.tensor([write(local, prompt())] * 2).view(1, -1)
    text, stands = outcomes(model, tokens, **{how: poor if how == "assistant_model" else 4})
    assert text == write(local, tokens)
    assert stands


@pytest.mark.parametrize("kinds", [("poor",), ("copies",), ("copies", "poor"), ("perfect",)])
def test_sampled_texts_are_those_of_the_same_random_numbers_without_guesses(
    model: Any, local: Any, poor: Any, kinds: tuple[str, ...]
) -> None:
    drafts = [{"poor": poor, "perfect": local, "copies": "copies"}[kind] for kind in kinds]
    texts, random = [], []
    for candidate, more in ((local, {}), (model, {"draft": drafts})):
        torch.manual_seed(5)
        texts.append([write(candidate, prompt(), do_sample=True, top_k=30, **more) for _ in range(2)])
        random.append(torch.rand(1).item())
    assert texts[0] == texts[1]
    assert random[0] == random[1]


def test_a_session_goes_on_over_several_calls(model: Any, local: Any, poor: Any) -> None:
    drafts: list[dict[str, Any]] = [{"draft": poor}, {}, {"draft": "copies"}, {"draft": local}]
    with model.inference_session(max_length=100) as session:
        text = prompt()
        for number in range(4):
            written = write(model, text, 8, **drafts[number])
            assert written == write(local, text, 8)
            assert session.position == len(written) - 1
            text = torch.cat([torch.tensor([written]), prompt(3, seed=number)], dim=1)
        # Another text shares only its beginning.
        other = torch.cat([text[:, :5], prompt(4, seed=9)], dim=1)
        assert write(model, other, 8, draft=local) == write(local, other, 8)


@pytest.mark.parametrize("how", ["perfect", "copies"])
def test_guesses_need_no_room_beyond_the_end_of_the_text(model: Any, local: Any, how: str) -> None:
    draft = local if how == "perfect" else "copies"
    limit = model.config.max_position_embeddings
    repeated = write(local, prompt(), 40)[-10:] * 30
    tokens = torch.tensor([repeated[: limit - NEW]])
    expected = write(local, tokens, limit - tokens.shape[1])
    with model.inference_session(max_length=limit - 1):  # the last token is never computed
        assert write(model, tokens, limit - tokens.shape[1], draft=draft) == expected
    assert write(model, tokens, limit - tokens.shape[1], draft=draft) == expected


def test_nothing_stands_behind_the_end_of_a_text(model: Any, local: Any) -> None:
    end = write(local, prompt())[7 + 9]
    expected = greedy(local, prompt(), eos_token_id=end)
    with model.inference_session(max_length=64) as session:
        assert greedy(model, prompt(), eos_token_id=end, draft=local).equal(expected)
        assert session.position == expected.shape[1] - 1
        seen: list[list[int]] = []

        def watch(tokens: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            seen.append(tokens[0].tolist())
            return torch.tensor([len(seen) == 5])

        found = greedy(model, prompt(), draft=local, stopping_criteria=StoppingCriteriaList([watch]))
    assert found.equal(greedy(local, prompt(), 5))
    assert seen == [found[0, : 8 + number].tolist() for number in range(5)]


@pytest.mark.parametrize("how", ["draft", "assistant_model"])
def test_each_text_of_a_batch_has_its_own_guesses(model: Any, local: Any, poor: Any, how: str) -> None:
    expected = greedy(local, **padded_batch())
    assert greedy(model, **padded_batch(), **{how: poor}).equal(expected)


def test_scores_are_those_of_the_full_model(model: Any, local: Any, poor: Any) -> None:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    want, got = (
        candidate.generate(prompt(), do_sample=False, **SETTINGS, **more, **draft)
        for candidate, draft in ((local, {}), (model, {"draft": poor}))
    )
    assert got.sequences.equal(want.sequences)
    for name in ("scores", "logits"):
        assert torch.stack(got[name]).allclose(torch.stack(want[name]), atol=1e-4)


def test_states_go_back_without_a_replay(tmp_path: Path) -> None:
    folder = zoo.make_checkpoint("qwen3_5_text", tmp_path)
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    truth, events = write(local, prompt()), list[Any]()

    class OftenWrong(Draft):
        name = "often wrong"

        def propose(self, context: Context, count: int, choose: Choose) -> list[Guess]:
            known = len(context.tokens)
            return [Guess(token if place % 4 else 5, 1.0) for place, token in enumerate(truth)][known : known + count]

    with (
        run_swarm(folder, ("0:3", "3:6"), dtype="float32") as swarm,
        run_client(swarm, dtype="float32") as model,
        model.inference_session(max_length=64, listener=events.append),
    ):
        assert write(model, prompt(), draft=OftenWrong) == truth
    stands = [event.stands for event in events if isinstance(event, GuessVerified)]
    assert True in stands
    assert False in stands
    assert not any(isinstance(event, Replayed) for event in events)


def test_what_cannot_draft_is_refused(model: Any, poor: Any) -> None:
    with pytest.raises(UsageError, match="a draft has to run at this client"):
        write(model, prompt(), assistant_model=model)
    with pytest.raises(UsageError, match="draft='fast' is neither 'copies'"):
        write(model, prompt(), draft="fast")
    with pytest.raises(UsageError, match="tokens that leave early are guesses already"):
        write(model, prompt(), draft="copies", early_exit=EarlyExit())
    with pytest.raises(UsageError, match="draft is for greedy search and sampling, not for beam search; leave it out"):
        write(model, prompt(), draft="copies", num_beams=2)
    with pytest.raises(UsageError, match="each text of a batch needs a session of its own"):
        write(model, prompt(), draft="copies", do_sample=True, num_return_sequences=2)
    watermark = SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)
    with pytest.raises(ProcessorsWithState, match="draft does not go together with SynthIDText"):
        write(model, prompt(), do_sample=True, watermarking_config=watermark, draft=poor)
    with pytest.raises(UsageError, match="assistant_early_exit drafts from hidden states inside"):
        assisted_draft(SimpleNamespace(assistant_early_exit=1), None)
    assert len(write(model, prompt(), 3, draft=CopyDraft)) == 10


def test_guesses_do_not_change_rotary_frequencies() -> None:
    for rope_limit, is_dynamic, room in [(12, False, 14), (7, False, 20), (7, True, 9), (30, True, 20), (None, 0, 20)]:
        assert guess_room(20, rope_limit, padding=2, has_dynamic_rope=bool(is_dynamic))(10) == room


@pytest.mark.slow
@pytest.mark.parametrize("how", ["perfect", "poor"])
def test_servers_are_killed_again_and_again(swarm: TestSwarm, local: Any, poor: Any, how: str) -> None:
    """A server at every fifth token, in turns the first, the middle, and the last of the route. Last here: it ends the
    servers that other tests' clients know."""
    killed = []

    def kill(session: Any) -> None:
        killed.append(holder(swarm, session, (0, 2, 5)[len(killed) % 3]))
        swarm.start(killed[-1].blocks, dtype="float32").wait_ready()
        killed[-1].kill()

    for blocks in SPANS:
        for _ in range(2 - len(swarm.holders(blocks))):
            swarm.start(blocks, dtype="float32").wait_ready()
    with run_client(swarm, dtype="float32", wire="none") as model, model.inference_session(max_length=64) as session:
        before = StoppingCriteriaList([Before(session, dict.fromkeys(range(5, NEW, 5), kill))])
        draft = local if how == "perfect" else poor
        assert write(model, prompt(), stopping_criteria=before, draft=draft) == write(local, prompt())
    assert len(killed) == 4
