"""Log probabilities of completions in OpenAI's form."""

from __future__ import annotations

from swarm.gateway.openai.response_writers import AccumulatedAnswer, CompletionResponseWriter
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_output import SequenceDelta


class Letters:
    """A tokenizer whose tokens are letters. 0 is special, and 1 and 2 are written alike."""

    all_special_ids = [0]

    def decode(self, tokens, **_):
        return "".join(("<s>", "a", "a", "b", "cd")[token] for token in tokens)

    def convert_ids_to_tokens(self, token):
        return self.decode([token])


def reported(prompt, tokens, echo):
    answer = AccumulatedAnswer()
    answer.add_delta(SequenceDelta("", prompt=prompt))
    answer.add_delta(SequenceDelta("", tokens=tokens))
    writer = CompletionResponseWriter("m", Letters(), echo)
    (choice,) = writer.body([answer], {})["choices"]
    return choice["logprobs"]


def test_the_prompts_tokens_come_first_and_special_ones_have_no_place_in_the_text():
    found = reported(
        (SampledToken(0), SampledToken(4, -1.0, ((3, -0.5),)), SampledToken(3, -2.0)),
        (SampledToken(1, -0.1, ((1, -0.1),)), SampledToken(0, -3.0)),
        ["cdb"],
    )
    assert found == {
        "tokens": ["<s>", "cd", "b", "a", "<s>"],
        "token_logprobs": [None, -1.0, -2.0, -0.1, -3.0],
        "top_logprobs": [None, {"b": -0.5, "cd": -1.0}, {"b": -2.0}, {"a": -0.1}, {"<s>": -3.0}],
        "text_offset": [0, 0, 2, 3, 4],
    }


def test_of_tokens_with_the_same_text_the_likeliest_is_reported():
    found = reported((), (SampledToken(2, -3.0, ((1, -0.2), (3, -1.0))),), [])
    assert found["top_logprobs"] == [{"a": -0.2, "b": -1.0}]
    assert found["token_logprobs"] == [-3.0]
