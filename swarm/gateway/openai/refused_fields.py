"""Fields that are refused by name: all that this gateway does not know, unless their value changes nothing.

Ignoring one would give another answer than the client asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from swarm.gateway.openai.api_errors import BadRequest

MAX_NEUTRAL_BYTES = 64
"""No value that changes nothing is longer."""

IGNORED = frozenset({"user", "safety_identifier", "metadata", "store", "request_id", "service_tier", "priority"}) | {
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "cache_prompt", "keep_alive"),
    *("prediction", "guided_decoding_backend"),
}
"""Fields that change no answer: they name the user, or say what to store and how fast or how to compute."""

Neutral = tuple[Any, ...]
"""Values that change nothing, besides null."""

RefusedFields = Mapping[str, tuple[Neutral, str]]
"""Names of fields, each with the values that change nothing, and what to use instead."""

COMMON: RefusedFields = {
    "add_special_tokens": ((), ""),
    "allowed_token_ids": ((), "use logit_bias or structured_outputs"),
    "bad_words": (([],), "use logit_bias"),
    "early_stopping": ((False,), ""),
    "enable_thinking": ((), "write it into chat_template_kwargs"),
    "grammar": (("",), "use structured_outputs with json, regex or choice"),
    "guided_grammar": ((), "use guided_json, guided_regex or guided_choice"),
    "guided_whitespace_pattern": ((), ""),
    "ignore_eos": ((False,), "use logit_bias against the end token"),
    "include_stop_str_in_output": ((False,), ""),
    "json_schema": (({},), "use response_format"),
    "length_penalty": ((1,), ""),
    "logits_processors": (([],), ""),
    "min_tokens": ((0,), "use logit_bias against the end token"),
    "mirostat": ((0,), ""),
    "prompt_logprobs": ((), "use /v1/completions with echo and logprobs"),
    "repeat_penalty": ((1,), "use repetition_penalty"),
    "return_token_ids": ((False,), ""),
    "return_tokens_as_token_ids": ((False,), ""),
    "skip_special_tokens": ((True,), ""),
    "spaces_between_special_tokens": ((True, False), ""),
    "tfs_z": ((1,), ""),
    "top_a": ((0,), ""),
    "typical_p": ((1,), ""),
    "use_beam_search": ((False,), ""),
    "verbosity": (("medium",), "write it into the prompt"),
}
"""Of both endpoints."""

CHAT: RefusedFields = {
    **COMMON,
    "add_special_tokens": ((False,), ""),
    "audio": ((), ""),
    "best_of": ((1,), "use n"),
    "chat_template": ((), "the model's own is used"),
    "documents": (([],), "write them into the messages"),
    "echo": ((False,), "use /v1/completions"),
    "function_call": (("none", "auto"), "use tools and tool_choice"),
    "functions": (([],), "use tools and tool_choice"),
    "include_reasoning": ((True,), "leave reasoning_content unread"),
    "modalities": ((["text"],), ""),
    "mm_processor_kwargs": (({},), ""),
    "separate_reasoning": ((True,), ""),
    "web_search_options": ((), ""),
}

COMPLETION: RefusedFields = {
    **COMMON,
    "add_special_tokens": ((True,), "send the prompt as token ids"),
    "max_completion_tokens": ((), "use max_tokens"),
    "suffix": (("",), ""),
}


EMBEDDING: RefusedFields = {"dimensions": ((), "the model's are used")}


def refuse_fields(body: bytes, known: Collection[str], table: RefusedFields) -> None:
    """Refuse a request, which is a JSON object, with fields that are neither known nor ignored.

    Raises:
        BadRequest: it has one, with a value that may change the answer.
    """
    taken = IGNORED.union(known).difference(table)
    for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        neutral, advice = table.get(name, ((), ""))
        if name not in taken and not _is_neutral(value, neutral):
            raise unsupported(name[:64], advice)


def unsupported(name: str, advice: str = "") -> BadRequest:
    """The error for a field that is not supported."""
    return BadRequest(f"{name} is not supported; {advice or 'leave it out'}", param=name, code="unsupported_parameter")


def _is_neutral(raw: msgspec.Raw, neutral: Neutral) -> bool:
    if memoryview(raw).nbytes > MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return value is None or any(type(value) is type(one) and value == one for one in _with_floats(neutral))


def _with_floats(neutral: Neutral) -> Neutral:
    """The values, whole numbers also as floats."""
    return (*neutral, *(float(one) for one in neutral if type(one) is int))
