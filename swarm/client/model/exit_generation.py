"""`generate(early_exit=...)`: transformers prepares the call, `ExitDecoder` generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swarm.client.early_exit.exit_decoder import ExitDecoder, Sampling
from swarm.client.early_exit.options import EarlyExit
from swarm.client.early_exit.token_output import TokenOutput
from swarm.client.model.remote_sequential import StepSent
from swarm.client.model.train_exits import base_model, read_hidden
from swarm.client.session import InferenceSession, StepUnderWay
from swarm.client.threads.compute_lock import shared_with_no_lane
from swarm.errors import NoExitClassifiers, ProcessorsWithState, SwarmError, UsageError
from swarm.models.exits.direct_reading import DirectReading
from swarm.models.exits.trained_exits import TrainedExits
from swarm.models.generation_output import generation_output
from swarm.models.logits_processors import processors_with_state
from swarm.models.placeholder_cache import PlaceholderCache
from swarm.protocol.messages import ExitTerms


def sample_with_exits(
    model: Any,
    options: EarlyExit,
    tokens_RT: torch.Tensor,
    process: Any,
    stopping: Any,
    config: Any,
    streamer: Any,
    arguments: dict[str, Any],
) -> Any:
    """The sequences with what follows them. Takes what transformers' `_sample` takes, and returns what it returns.

    Raises:
        UsageError: the call asks for something that tokens which leave early do not have, or that its session was not
            opened for.
        ProcessorsWithState: it asks for logits processors that do not work with them; nothing was computed.
        NoExitClassifiers: no token could leave on this route; the session holds the prompt.
    """
    session = _session(arguments.get("past_key_values"))
    _require_no_state(process)
    record = _ScoreRecord(process, config)
    max_length = stopping.max_length or config.max_length
    if session.rope_limit is not None and tokens_RT.shape[1] <= session.rope_limit < max_length:
        raise UsageError(
            f"early_exit does not go beyond {session.rope_limit} tokens with this model, whose rotary frequencies "
            "change there, so that a text begins again; pass a smaller max_new_tokens, or early_exit=None"
        )
    session.prepare_for(options)
    prompt = model._prefill(tokens_RT, config, arguments)
    arguments = model._update_model_kwargs_for_generation(prompt, arguments)
    ends = config._eos_token_tensor

    def is_finished(tokens_RT: torch.Tensor) -> torch.Tensor:
        record.confirm()
        finished_R: torch.Tensor = stopping(tokens_RT, record.scores)
        return finished_R

    sampling = Sampling(
        process=record.process if record.is_asked else process,
        is_finished=is_finished,
        sample=bool(config.do_sample),
        pad=config._pad_token_tensor if ends is not None else None,
        ends=ends,
        max_length=max_length,
    )
    exits = (model.exits or TrainedExits(base_model(model))).to(tokens_RT.device)
    if options.confidence == "classifier" and options.fill == "exact":
        _require_classifiers(exits, session.boundaries)
    forward = ModelForward(model, arguments, tokens_RT.shape[1] + 1)
    output = TokenOutput(streamer)
    decoder = ExitDecoder(options, exits, session, forward, sampling, output)
    result = decoder.generate(tokens_RT, prompt.logits[:, -1].float())
    output.end()
    if not config.return_dict_in_generate:
        return result
    return generation_output(result, record.scores, record.logits, session.cache)


class _ScoreRecord:
    """Keeps the scores from which the tokens were chosen that stand, as far as the caller asked for them.

    A position may be processed several times, as a guess and again; what was processed last before its token stands is
    what the token was chosen from.

    Args:
        process: sequences `[R, T]` and logits `[R, V]` to processed logits.
        config: transformers' settings of the call.

    Attributes:
        scores, logits: for each generated token, processed and not, `[R, V]` float32; None if not asked for.

    Raises:
        UsageError: the call asks for hidden states or attentions.
    """

    def __init__(self, process: Any, config: Any) -> None:
        asked = config.return_dict_in_generate
        for name in ("output_hidden_states", "output_attentions"):
            if asked and getattr(config, name, False):
                raise UsageError(f"early_exit does not collect what {name} asks for; leave it out, or early_exit")
        self.scores: tuple[torch.Tensor, ...] | None = () if asked and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if asked and config.output_logits else None
        self.is_asked = self.scores is not None or self.logits is not None
        self._process = process
        self._newest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By length of the sequences: processed and not."""

    def process(self, tokens_RT: torch.Tensor, logits_RV: torch.Tensor) -> torch.Tensor:
        """Process, and remember."""
        scores_RV: torch.Tensor = self._process(tokens_RT, logits_RV.clone())
        self._newest[tokens_RT.shape[1]] = (scores_RV, logits_RV)
        return scores_RV

    def confirm(self) -> None:
        """The next token stands."""
        if not self.is_asked:
            return
        scores_RV, logits_RV = self._newest.pop(min(self._newest))
        if self.scores is not None:
            self.scores += (scores_RV,)
        if self.logits is not None:
            self.logits += (logits_RV,)


def _require_no_state(process: Any) -> None:
    if names := processors_with_state(process):
        raise ProcessorsWithState(
            f"early_exit does not go together with {', '.join(names)}, which counts on seeing each position once and "
            "in order; leave out watermarking_config or guidance_scale, or pass early_exit=None"
        )


def _require_classifiers(exits: TrainedExits, boundaries: Sequence[int]) -> None:
    if boundaries and not exits.classifiers.keys() & set(boundaries):
        places = ", ".join(map(str, boundaries))
        raise NoExitClassifiers(
            f"confidence='classifier': the model has no classifier for any of the blocks {places}, where servers of "
            "this route begin; train them with model.train_exits(kind='classifier')"
        )


def _session(cache: Any) -> InferenceSession:
    if not isinstance(cache, PlaceholderCache):
        raise UsageError("early_exit needs a session; leave use_cache=False and past_key_values out")
    session: InferenceSession = cache.session
    return session


class ModelForward:
    """The two halves of a distributed model's forward.

    Args:
        arguments: of its forward, for sequences of `length` tokens.
    """

    def __init__(self, model: Any, arguments: dict[str, Any], length: int) -> None:
        self._model, self._arguments, self._length = model, arguments, length
        self._read = DirectReading(lambda hidden_R1H: read_hidden(model, hidden_R1H)[:, -1], shared_with_no_lane)

    def send(self, tokens_RT: torch.Tensor, exits: ExitTerms | None, exit_block: int | None) -> StepUnderWay:
        arguments, more = dict(self._arguments), tokens_RT.shape[1] - self._length
        if more:
            arguments = self._model._update_model_kwargs_for_generation({}, arguments, num_new_tokens=more)
        inputs = self._model.prepare_inputs_for_generation(tokens_RT, next_sequence_length=1, **arguments)
        try:
            with self._model.remote_layer.sending(exits, exit_block):
                self._model(**inputs, return_dict=True)
        except StepSent as sent:
            self._read.prepare(sent.step.hidden)  # while the first server computes
            return sent.step
        raise SwarmError("the model has computed a step without its blocks")

    def logits(self, hidden_R1H: torch.Tensor) -> torch.Tensor:
        return self._read(hidden_R1H)
