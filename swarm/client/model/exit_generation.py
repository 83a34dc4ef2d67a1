"""`generate(early_exit=...)`: transformers prepares the call, `ExitDecoder` generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm.client.early_exit.exit_decoder import ExitDecoder
from swarm.client.early_exit.options import EarlyExit
from swarm.client.model.generation_loop import LoopCall
from swarm.client.model.train_exits import base_model
from swarm.errors import NoExitClassifiers, UsageError
from swarm.models.exits.trained_exits import TrainedExits


def sample_with_exits(model: Any, options: EarlyExit, call: LoopCall) -> Any:
    """The sequences with what follows them.

    Raises:
        UsageError: the call asks for something that tokens which leave early do not have, or that its session was not
            opened for.
        ProcessorsWithState: it asks for logits processors that do not work with them; nothing was computed.
        NoExitClassifiers: no token could leave on this route; the session holds the prompt.
    """
    session, tokens_RT = call.session, call.tokens_RT
    if session.rope_limit is not None and tokens_RT.shape[1] <= session.rope_limit < call.max_length:
        raise UsageError(
            f"early_exit does not go beyond {session.rope_limit} tokens with this model, whose rotary frequencies "
            "change there, so that a text begins again; pass a smaller max_new_tokens, or early_exit=None"
        )
    session.prepare_for(options)
    logits_RV, forward = call.prefill(model)
    exits = (model.exits or TrainedExits(base_model(model))).to(tokens_RT.device)
    if options.confidence == "classifier" and options.fill == "exact":
        _require_classifiers(exits, session.boundaries)
    decoder = ExitDecoder(options, exits, session, forward, call.sampling, call.output)
    return call.result(decoder.generate(tokens_RT, logits_RV))


def _require_classifiers(exits: TrainedExits, boundaries: Sequence[int]) -> None:
    if boundaries and not exits.classifiers.keys() & set(boundaries):
        places = ", ".join(map(str, boundaries))
        raise NoExitClassifiers(
            f"confidence='classifier': the model has no classifier for any of the blocks {places}, where servers of "
            "this route begin; train them with model.train_exits(kind='classifier')"
        )
