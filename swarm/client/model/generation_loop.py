"""What the loops have in common that replace transformers' own: transformers prepares a call, they generate.

`LoopCall` turns what transformers' `_sample` takes into what a loop needs, and what a loop gives into what `_sample`
returns.
"""

from __future__ import annotations

from typing import Any

import torch

from swarm.client.early_exit.token_output import TokenOutput
from swarm.client.model.remote_sequential import StepSent
from swarm.client.model.train_exits import read_hidden
from swarm.client.sampling import Sampling
from swarm.client.session import InferenceSession, StepUnderWay
from swarm.client.threads.compute_lock import shared_with_no_lane
from swarm.errors import ProcessorsWithState, SwarmError, UsageError
from swarm.models.exits.direct_reading import DirectReading
from swarm.models.generation_output import generation_output
from swarm.models.logits_processors import processors_with_state
from swarm.models.placeholder_cache import PlaceholderCache
from swarm.protocol.messages import ExitTerms


class LoopCall:
    """One `generate` call as transformers has prepared it for its loop.

    Args:
        option: the argument of `generate` that asks for another loop, for errors.
        tokens_RT, process, stopping, config, streamer, arguments: as transformers' `_sample` takes them.

    Attributes:
        sampling: how tokens are chosen.
        output: where they go.
        session: of the call.

    Raises:
        UsageError: the call asks for something that such loops do not have.
        ProcessorsWithState: it asks for logits processors that do not work with them.
    """

    def __init__(
        self,
        option: str,
        tokens_RT: torch.Tensor,
        process: Any,
        stopping: Any,
        config: Any,
        streamer: Any,
        arguments: dict[str, Any],
    ) -> None:
        cache = arguments.get("past_key_values")
        if not isinstance(cache, PlaceholderCache):
            raise UsageError(f"{option} needs a session; leave use_cache=False and past_key_values out")
        _require_supported(option, process, config)
        self.tokens_RT, self.process, self.arguments = tokens_RT, process, arguments
        self.session: InferenceSession = cache.session
        self.max_length: int = stopping.max_length or config.max_length
        self.output = TokenOutput(streamer)
        self._config = config
        self._record = record = _ScoreRecord(process, config)
        ends = config._eos_token_tensor

        def is_finished(tokens_RT: torch.Tensor) -> torch.Tensor:
            record.confirm()
            finished_R: torch.Tensor = stopping(tokens_RT, record.scores)
            return finished_R

        self.sampling = Sampling(
            process=record.process if record.is_asked else process,
            is_finished=is_finished,
            sample=bool(config.do_sample),
            pad=config._pad_token_tensor if ends is not None else None,
            ends=ends,
            max_length=self.max_length,
        )

    def prefill(self, model: Any) -> tuple[torch.Tensor, ModelForward]:
        """Compute the prompt: the logits `[R, V]` float32 of its last tokens, and the forward for those behind."""
        prompt = model._prefill(self.tokens_RT, self._config, self.arguments)
        arguments = model._update_model_kwargs_for_generation(prompt, self.arguments)
        return prompt.logits[:, -1].float(), ModelForward(model, arguments, self.tokens_RT.shape[1] + 1)

    def result(self, texts_RT: torch.Tensor) -> Any:
        """What transformers' loop returns for these texts."""
        self.output.end()
        if not self._config.return_dict_in_generate:
            return texts_RT
        return generation_output(texts_RT, self._record.scores, self._record.logits, self.session.cache)


def _require_supported(option: str, process: Any, config: Any) -> None:
    if names := processors_with_state(process):
        raise ProcessorsWithState(
            f"{option} does not go together with {', '.join(names)}, which counts on seeing each position once and "
            f"in order; leave out watermarking_config or guidance_scale, or {option}"
        )
    for name in ("output_hidden_states", "output_attentions"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise UsageError(f"{option} does not collect what {name} asks for; leave it out, or {option}")


class _ScoreRecord:
    """Keeps the scores from which the tokens were chosen that stand, as far as the caller asked for them.

    A position may be processed several times, as a guess and again; what was processed last before its token stands is
    what the token was chosen from.

    Args:
        process: sequences `[R, T]` and logits `[R, V]` to processed logits.
        config: transformers' settings of the call.

    Attributes:
        scores, logits: for each generated token, processed and not, `[R, V]` float32; None if not asked for.
    """

    def __init__(self, process: Any, config: Any) -> None:
        asked = config.return_dict_in_generate
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


class ModelForward:
    """The two halves of a distributed model's forward.

    Args:
        arguments: of its forward, for sequences of `length` tokens.
    """

    def __init__(self, model: Any, arguments: dict[str, Any], length: int) -> None:
        self._model, self._arguments, self._length = model, arguments, length
        self._read = DirectReading(lambda hidden_R1H: read_hidden(model, hidden_R1H)[:, -1], shared_with_no_lane)

    def send(
        self, tokens_RT: torch.Tensor, exits: ExitTerms | None = None, exit_block: int | None = None, count: int = 1
    ) -> StepUnderWay:
        """Begin the step of the last `count` tokens of each sequence; for `exits` and `exit_block` see
        `InferenceSession.begin`."""
        inputs = self._inputs(tokens_RT, count)
        try:
            with self._model.remote_layer.sending(exits, exit_block):
                self._model(**inputs, return_dict=True)
        except StepSent as sent:
            self._read.prepare(sent.step.hidden.flatten(0, 1).unsqueeze(1))  # while the first server computes
            return sent.step
        raise SwarmError("the model has computed a step without its blocks")

    def compute(self, tokens_RT: torch.Tensor) -> torch.Tensor:
        """The logits `[R, V]` behind sequences, computed like any forward. Meanwhile, no step is under way."""
        logits_RTV: torch.Tensor = self._model(**self._inputs(tokens_RT, 1), return_dict=True).logits
        return logits_RTV[:, -1].float()

    def logits(self, hidden_R1H: torch.Tensor) -> torch.Tensor:
        """The logits `[R, V]` of hidden states behind the last block, or as if they were."""
        return self._read(hidden_R1H)

    def _inputs(self, tokens_RT: torch.Tensor, count: int) -> Any:
        """Of the model's forward for the last `count` tokens."""
        arguments, more = dict(self._arguments), tokens_RT.shape[1] - self._length
        if more:
            arguments = self._model._update_model_kwargs_for_generation({}, arguments, num_new_tokens=more)
        return self._model.prepare_inputs_for_generation(tokens_RT, next_sequence_length=count, **arguments)
