"""A client's model against the local transformers model, over three real server processes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from swarm.client.model.generation_mixin import unseen_length
from swarm.errors import InvalidSpan, SessionClosed, TooLong, UsageError
from tests.client.conftest import SPANS
from tests.client.prompts import PAD, greedy, padded_batch, prompt
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.zoo import PROMPTS


def test_figure_2_of_the_paper_as_written(model: Any, local: Any) -> None:
    def sample_next_token(probs: torch.Tensor) -> torch.Tensor:
        return probs[:, -1].argmax(-1, keepdim=True)

    sequence_length = 10
    input_ids = prompt()
    written = []

    with model.inference_session(max_length=32) as session:
        # Session maintains a list of servers that
        # remember attention KV from previous steps
        for _ in range(sequence_length):
            # Compute the word embeddings locally
            hidden = model.word_embeddings(input_ids)
            # Run distributed Transformer blocks,
            # store attention KV for future steps
            hidden = session.step(hidden)
            # Generate the next token locally
            probs = model.lm_head(hidden)
            input_ids = sample_next_token(probs)
            written.append(int(input_ids))

    assert written == greedy(local, prompt(), sequence_length)[0, 7:].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "top_k": 20, "temperature": 0.8},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 3, "do_sample": True},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": False, "prefill_chunk_size": 3},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_generate_takes_what_transformers_takes(model: Any, local: Any, settings: dict[str, Any]) -> None:
    results = []
    for candidate in (local, model):
        torch.manual_seed(7)
        results.append(candidate.generate(**padded_batch(), max_new_tokens=10, pad_token_id=PAD, **settings))
    assert results[0].tolist() == results[1].tolist()


def test_prompt_lookup_rolls_rejected_candidates_back(model: Any, local: Any) -> None:
    tokens = torch.tensor([PROMPTS[1] * 2])
    expected = greedy(local, tokens, 12)
    assert greedy(model, tokens, 12, prompt_lookup_num_tokens=4).tolist() == expected.tolist()


def test_streamers_and_stopping_criteria(model: Any, local: Any) -> None:
    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Collect()
    stop = StoppingCriteriaList([MaxLengthCriteria(max_length=13)])
    written = greedy(model, prompt(), 40, streamer=streamer, stopping_criteria=stop)
    assert written.shape[1] == 13
    assert streamer.tokens == written[0].tolist() == greedy(local, prompt(), 6)[0].tolist()
    assert streamer.ended


def test_several_calls_in_one_session_compute_only_what_is_new(model: Any, local: Any) -> None:
    with model.inference_session(max_length=64) as session:
        first = greedy(model, prompt(), 6)
        assert session.position == 12
        longer = torch.cat([first, prompt(3, seed=9)], dim=1)
        second = greedy(model, longer, 6)
        assert second.tolist() == greedy(local, longer, 6).tolist()
        assert session.position == longer.shape[1] + 5
        # Another text shares nothing but the first tokens: the session goes back to where they part.
        other = torch.cat([prompt()[:, :4], prompt(6, seed=11)], dim=1)
        assert greedy(model, other, 6).tolist() == greedy(local, other, 6).tolist()
        assert session.cache.sequences == 1
        batch = padded_batch()
        expected = local.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=PAD)
        assert (
            model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=PAD).tolist() == expected.tolist()
        )
        # The padded batch goes on as well.
        more = {"input_ids": expected, "attention_mask": (expected != PAD).long()}
        expected = local.generate(**more, max_new_tokens=5, do_sample=False, pad_token_id=PAD)
        assert model.generate(**more, max_new_tokens=5, do_sample=False, pad_token_id=PAD).tolist() == expected.tolist()


def test_a_prompt_longer_than_one_request(model: Any, local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.client.session.MAX_REQUEST_TOKENS", 6)  # three slots of a batch of two
    monkeypatch.setattr("swarm.client.chain.prompt_chunks.MAX_CHUNK_TOKENS", 6)
    batch = padded_batch()
    expected = local.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=PAD)
    assert model.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=PAD).tolist() == expected.tolist()
    with torch.no_grad():
        ours, theirs = model(**batch).logits, local(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-4)


def test_the_position_can_be_set_back(model: Any, local: Any) -> None:
    tokens = prompt(9)
    with torch.no_grad():
        expected = local(torch.cat([tokens[:, :4], tokens[:, 6:]], dim=1)).logits[:, 4:]
    with model.inference_session(max_length=16) as session:
        session.step(model.word_embeddings(tokens[:, :6]))
        assert session.position == 6
        session.position = 4
        logits = model.lm_head(session.step(model.word_embeddings(tokens[:, 6:])))
        assert session.position == 7
        with pytest.raises(ValueError, match="between 0 and 7"):
            session.position = 8
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_session_has_limits_and_an_end(model: Any) -> None:
    with model.inference_session(max_length=8) as session:
        session.step(model.word_embeddings(prompt(6)))
        with pytest.raises(TooLong, match="max_length=8"):
            session.step(model.word_embeddings(prompt(3)))
        session.step(model.word_embeddings(prompt(2)))  # what still fits goes on
        with pytest.raises(ValueError, match="1 sequences and cannot continue with 2"):
            session.step(model.word_embeddings(prompt(1).expand(2, -1)))
    with pytest.raises(SessionClosed):
        session.step(model.word_embeddings(prompt(1)))


def test_forward_without_a_session(model: Any, local: Any) -> None:
    batch = padded_batch()
    with torch.no_grad():
        expected = local(**batch).logits
        logits = model(**batch).logits
        assert model(**batch).past_key_values is None
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-4)


def test_a_hand_written_loop_with_past_key_values(model: Any, local: Any) -> None:
    past_model = past_local = None
    tokens = prompt()
    for _ in range(4):
        with torch.no_grad():
            ours = model(tokens, past_key_values=past_model, use_cache=True)
            theirs = local(tokens, past_key_values=past_local, use_cache=True)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        past_model, past_local = ours.past_key_values, theirs.past_key_values
        tokens = theirs.logits[:, -1:].argmax(-1)


@pytest.mark.parametrize(("start", "end"), [(0, 6), (1, 4)])
def test_hidden_states_of_any_range_of_blocks(model: Any, local: Any, start: int, end: int) -> None:
    hidden = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = local.model.rotary_emb(hidden, torch.arange(5)[None])
    mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]
    expected = hidden
    with torch.no_grad():
        for layer in local.model.layers[start:end]:
            expected = layer(expected, position_embeddings=positions, attention_mask=mask)
        result = model.remote_blocks[start:end](hidden)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_ranges_of_blocks_are_checked(model: Any) -> None:
    assert len(model.remote_blocks) == 6
    assert str(model.remote_blocks[-1].span) == "5:6"
    with pytest.raises(InvalidSpan):
        model.remote_blocks[4:2]
    with pytest.raises(InvalidSpan):
        model.remote_blocks[0:6:2]
    with pytest.raises(IndexError):
        model.remote_blocks[6]
    with pytest.raises(ValueError, match="rows, tokens, hidden_size"):
        model.remote_blocks(torch.zeros(3, model.config.hidden_size))


@pytest.mark.parametrize(("wire", "tolerance"), [("float16", 0.005), ("auto", 0.1)])
def test_wire_formats(swarm: TestSwarm, local: Any, wire: str, tolerance: float) -> None:
    with torch.no_grad():
        expected = local(prompt()).logits
    with run_client(swarm, dtype="float32", wire=wire) as model, torch.no_grad():
        logits = model(prompt()).logits
        assert f"wire={'blockwise8' if wire == 'auto' else wire}" in repr(model)
    error = float((logits - expected).norm() / expected.norm())
    assert 0 < error < tolerance


@pytest.mark.slow
def test_a_model_of_16_bit_weights(folder: Path) -> None:
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with run_swarm(folder, SPANS, dtype="bfloat16") as swarm, run_client(swarm, dtype="bfloat16") as model:
        assert model.dtype == torch.bfloat16
        assert greedy(model, prompt(), 8).tolist() == greedy(local, prompt(), 8).tolist()


def test_two_clients_at_once(swarm: TestSwarm, local: Any) -> None:
    texts: dict[int, list[int]] = {}

    def write(seed: int) -> None:
        with run_client(swarm, dtype="float32") as model:
            texts[seed] = greedy(model, prompt(seed=seed), 20)[0].tolist()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {seed: greedy(local, prompt(seed=seed), 20)[0].tolist() for seed in (1, 2)}


def test_unsupported_arguments_are_refused(model: Any) -> None:
    from transformers import DynamicCache

    with pytest.raises(UsageError, match="DynamicCache"):
        model(prompt(), past_key_values=DynamicCache())
    with pytest.raises(UsageError, match="attention masks"), torch.no_grad():
        model(prompt(), attention_mask=torch.zeros(1, 1, 7, 7))


def test_unseen_length() -> None:
    for cached, given, mask, unseen in [
        (0, 5, 5, None),
        (3, 5, 5, 2),
        (3, 5, None, 2),
        (3, 5, 8, None),
        (5, 5, 5, None),
        (9, 5, 5, None),
    ]:
        assert unseen_length(cached, given, mask) == unseen
