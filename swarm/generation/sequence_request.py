"""What is asked of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.client.early_exit.options import EarlyExit
from swarm.generation.formats.thinking import ThinkingParser
from swarm.generation.formats.tool_calls import ToolCallParser
from swarm.generation.sampling import SamplingOptions, TokenConstraint


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to generate.

    Attributes:
        prompt: token ids.
        max_tokens: limit on the new tokens; may be 0.
        scores_prompt: whether the log probabilities of the prompt's tokens are reported, with as many likeliest tokens
            as for new ones; then the token that ends the sequence is reported as well.
        sampling: how tokens are chosen.
        stops: texts at which the sequence ends.
        constraint: the form that the text must have; None for any.
        tools: parses tool calls in the text; None if there are no tools.
        thinking: separates thoughts from the text; None if there are none, or they are part of the text.
        repetition_penalty: transformers' own; None for the model's default.
        end_tokens: tokens that end the sequence, besides the model's own; they are not part of the text.
        early_exit: when tokens leave before the last block; None for never.
        is_exit_asked: whether the request asks for that itself, rather than having it by default.
        provisional: whether the text of tokens that left is shown before they are verified.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingOptions
    scores_prompt: bool = False
    stops: Sequence[str] = ()
    constraint: TokenConstraint | None = None
    tools: ToolCallParser | None = None
    thinking: ThinkingParser | None = None
    repetition_penalty: float | None = None
    end_tokens: frozenset[int] = frozenset()
    early_exit: EarlyExit | None = None
    is_exit_asked: bool = False
    provisional: bool = False
