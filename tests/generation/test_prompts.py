"""From conversations to sequences: thoughts, forms, and prompts that are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.formats.response_format import AnswerForm, GrammarCompiler
from swarm.generation.formats.thinking import ConstraintBehindThoughts, thinking_syntax
from swarm.generation.prompts import chat_sequences, completion_sequences
from swarm.generation.sequence_request import ROOM_LEFT, SequenceRequest
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.chat_template import TemplateOptions
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.models.tokenizers.prompts_here import prompts_here

CONTEXT = 64
HELLO = [{"role": "user", "content": "Hi"}]
MESSAGES = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
HYBRID = MESSAGES + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"  # as Qwen3
FORCED = MESSAGES + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"  # as DeepSeek R1
OFF = TemplateOptions({"enable_thinking": False})
CONTINUED = TemplateOptions(continue_final=True)


def serve(template: str, has_tokens: bool = True) -> Any:
    tokenizer = load_tokenizer(DEMO_FOLDER)
    tokenizer.chat_template = template
    if has_tokens:
        tokenizer.add_tokens(["<think>", "</think>"])
    usual = SimpleNamespace(temperature=None, top_p=None, top_k=None)
    return SimpleNamespace(
        name="m",
        tokenizer=tokenizer,
        prompts=prompts_here(tokenizer),
        model=SimpleNamespace(generation_config=usual),
        context_length=CONTEXT,
        vocabulary_size=len(tokenizer),
        tool_syntax=None,
        thinking_syntax=thinking_syntax(template),
        grammars=GrammarCompiler(tokenizer, len(tokenizer)),
        end_tokens=frozenset([tokenizer.eos_token_id]),
    )


def sequence(served: Any, template: TemplateOptions | None = None, messages: Any = HELLO, **options: Any) -> Any:
    (made,) = chat_sequences(served, messages, SequenceRequest(separate_thoughts=True, **options), template=template)
    return made


def test_where_the_thoughts_of_an_answer_are():
    for template, options, said, expected in [
        (HYBRID, None, "<think>a</think>b", ("a", "b")),
        (HYBRID, None, "b", ("", "b")),
        (HYBRID, OFF, "b", ("", "b")),
        (FORCED, None, "a</think>b", ("a", "b")),
        (FORCED, CONTINUED, "b</think>c", ("", "b</think>c")),
    ]:
        messages = [*HELLO, {"role": "assistant", "content": "Well,"}] if options is CONTINUED else HELLO
        parser = sequence(serve(template), options, messages).thinking
        thought, content = parser.feed(said)
        more_thought, more = parser.finish()
        assert (thought + more_thought, content + more) == expected


def test_a_thought_that_is_continued():
    messages = [*HELLO, {"role": "assistant", "content": "<think>I am"}]
    assert sequence(serve(HYBRID), CONTINUED, messages).thinking.feed(" here</think>So.") == ("here", "So.")


def test_models_and_chats_without_thoughts():
    assert sequence(serve(MESSAGES)).thinking is None
    (plain,) = chat_sequences(serve(HYBRID), HELLO, SequenceRequest())
    assert plain.thinking is None


FORM = AnswerForm({"type": "json_object"})


def test_a_form_is_that_of_what_follows_the_thoughts():
    for template, options, thinks in [(HYBRID, None, True), (HYBRID, OFF, False), (FORCED, None, True)]:
        assert isinstance(sequence(serve(template), options, form=FORM).constraint, ConstraintBehindThoughts) is thinks


def test_a_thought_whose_end_cannot_be_told_goes_with_no_form():
    with pytest.raises(InvalidGenerationRequest, match="cannot be kept to a form"):
        sequence(serve(FORCED, has_tokens=False), form=FORM)


def test_the_end_of_a_longer_prompt_is_kept():
    for keep, max_tokens, kept, left in [
        (10, 4, 10, 4),
        (-1, 4, CONTEXT - 4, 4),
        (-1, None, CONTEXT - 1, 1),
        (10, ROOM_LEFT, 10, CONTEXT - 10),
        (99, 4, 50, 4),
    ]:
        prompt = [5 + n for n in range(100 if keep != 99 else 50)]
        options = SequenceRequest(prompt_tokens=keep, max_tokens=max_tokens)
        (made,) = completion_sequences(serve(MESSAGES), [prompt], options)
        assert list(made.prompt) == prompt[-kept:]
        assert made.limit == left


def test_a_prompt_as_long_as_the_context_may_have_no_new_token():
    (made,) = completion_sequences(serve(MESSAGES), [[5] * CONTEXT], SequenceRequest(max_tokens=0))
    assert made.limit == 0
    for tokens, limit in ((CONTEXT, 1), (CONTEXT, None), (CONTEXT + 1, 0)):
        with pytest.raises(InvalidGenerationRequest, match="maximum context length is 64 tokens"):
            completion_sequences(serve(MESSAGES), [[5] * tokens], SequenceRequest(max_tokens=limit))


def test_stop_tokens_are_the_models():
    (made,) = completion_sequences(serve(MESSAGES), ["Once"], SequenceRequest(end_tokens=[7]))
    assert made.end_tokens == [7]
    with pytest.raises(InvalidGenerationRequest) as caught:
        completion_sequences(serve(MESSAGES), ["Once"], SequenceRequest(end_tokens=[99_999]))
    assert caught.value.parameter == "stop_token_ids"
