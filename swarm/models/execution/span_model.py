"""A span of blocks, ready to compute: the cut model and the strategy by which it computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn

from swarm.data_structures import ExitThresholds, Span
from swarm.errors import InvalidSpan
from swarm.models.adapters.adapter_batch import active_adapters
from swarm.models.adapters.layer_hooks import AdaptedLayers
from swarm.models.attention.multi_session_attention import ActiveBatch, KeysOnlyBatch, KeysStored, PackedBatch
from swarm.models.attention.padded_kv import PaddedKV
from swarm.models.cutting import families
from swarm.models.execution.cuda_graphs import DecodeGraphs
from swarm.models.execution.hooked_module import HookedModule
from swarm.models.execution.step_part import StepPart
from swarm.models.execution.strategy import PADDED, ExecutionStrategy
from swarm.models.exits.span_exits import SpanExits
from swarm.models.flash.flash_span import FlashSpan
from swarm.models.weights.quantization import weight_bytes

MAX_PARTS_PER_BLOCK = 4
"""Parts of a span that are remembered, for each of its blocks. Clients choose parts, and there are many; one that is
not remembered takes about a millisecond to make again."""


class SpanModel:
    """The blocks of one span, ready to compute. Make one with `span_loading.load_span`.

    Args:
        cut: the family's model, cut to these blocks.
        adapted: the layers of the wider span that this one is a part of; None for a span that was just loaded.
        strategy: how it computes. It never changes; `with_strategy` makes another model of the same weights.
        flash: reads those of the weights that are on flash; None if all are in memory.

    Attributes:
        span: which blocks.
        family: the config's `model_type`.
        hidden_size: width of the hidden states.
        dtype, device: what it computes in, and where.
        digests: one a block, see `swarm.models.checkpoints.block_digest`.
        weight_bytes: memory that the weights take, in whatever form they are held.
        positions: how many positions the model's tables hold, or None if it computes any position.
        has_states: whether there are layers with a state. Then several tokens of a sequence come in a row of their own.
        graphs: the recorded decode steps, if the strategy has any.
        adapted: the layers, where adapters are added to them.
        exits: where tokens may leave; None if they pass all blocks.
    """

    def __init__(
        self,
        cut: HookedModule,
        span: Span,
        digests: list[str],
        hidden_size: int,
        adapted: AdaptedLayers | None = None,
        strategy: ExecutionStrategy = PADDED,
        flash: FlashSpan | None = None,
    ) -> None:
        self.cut = cut
        self.flash = flash
        self.span = span
        self.digests = digests
        self.hidden_size = hidden_size
        self.strategy = strategy
        self.adapted = adapted or AdaptedLayers(cut.layers, span.start, hidden_size)
        config: Any = cut.module.config
        self.family: str = config.model_type
        # Not the parameters' dtype: quantized weights are integers.
        self.dtype: torch.dtype = config.dtype
        self.device = next(cut.layers.parameters()).device
        self.weight_bytes = weight_bytes(cut.module) if flash is None else flash.weight_bytes
        self.positions = cut.positions
        self.has_states = families.has_states(config)
        self.graphs: DecodeGraphs | None = None
        if strategy.graph_recorder is not None and strategy.paging is not None:
            like = torch.empty(0, hidden_size, dtype=self.dtype, device=self.device)
            self.graphs = DecodeGraphs(self.run_packed, strategy.paging, strategy.graph_recorder, like)
        self.exits: SpanExits | None = None
        self._whole = self
        self._parts: dict[Span, SpanModel] = {}
        self._chosen_parts: dict[Span, SpanModel] = {}
        self._parts_lock = threading.Lock()  # the network loop opens sessions, the compute thread cuts passes

    @property
    def module(self) -> nn.Module:
        """The cut transformers model."""
        return self.cut.module

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks' own modules."""
        return self.cut.layers

    def with_strategy(self, strategy: ExecutionStrategy) -> SpanModel:
        """A model that computes the same blocks, with the same weights, in another way."""
        return SpanModel(self.cut, self.span, self.digests, self.hidden_size, self.adapted, strategy, self.flash)

    def with_exits(self, exits: SpanExits) -> SpanModel:
        """A model that computes the same in the same way, but lets tokens leave."""
        model = self.with_strategy(self.strategy)
        model.exits = exits
        return model

    def narrowed(self, span: Span) -> SpanModel:
        """Part of this span as a span of its own, sharing the weights. Raises `InvalidSpan` if it is not a part.

        For any thread. Parts record no decode steps.
        """
        if not self.span.start <= span.start < span.end <= self.span.end:
            raise InvalidSpan(f"blocks {span} are not a part of the span {self.span}")
        if span == self.span:
            return self
        if span in self._whole._chosen_parts:
            return self._whole._chosen_parts[span]
        whole = self._whole
        with whole._parts_lock:
            part = whole._parts.pop(span, None) or whole._part(span)
            whole._parts[span] = part  # behind those that were used longer ago
            while len(whole._parts) > MAX_PARTS_PER_BLOCK * whole.span.length:
                del whole._parts[next(iter(whole._parts))]
        return part

    def _part(self, span: Span) -> SpanModel:
        start, end = span.start - self.span.start, span.end - self.span.start
        part = SpanModel(
            self.cut.narrowed(start, end),
            span,
            self.digests[start:end],
            self.hidden_size,
            self.adapted,
            self.strategy.narrowed(start, end),
            self.flash,
        )
        part.exits, part._whole = self.exits, self
        return part

    def use_part(self, part: SpanModel) -> None:
        """Have `narrowed` return this model, which was made from what it returned before."""
        part.exits, part._whole = self.exits, self
        self._chosen_parts[part.span] = part

    def pieces(self) -> list[SpanModel]:
        """The span in parts, one after the other, between which tokens may leave."""
        return [self.narrowed(one) for one in self.exits.pieces(self.span)] if self.exits is not None else [self]

    @property
    def whole(self) -> SpanModel:
        """The model of which this one is a part, or itself."""
        return self._whole

    @property
    def joins_parts(self) -> bool:
        """Whether steps of different parts of the span can be computed in one pass.

        Not with recorded decode steps: a pass is cut wherever a part begins or ends, and only the whole is recorded.
        """
        return self.can_fill and self._whole.strategy.graph_recorder is None

    def token_cost(self, terms: ExitThresholds | None = None) -> float:
        """What a token costs at most, in blocks: those that it passes, and the head's share where it may leave."""
        readings = self.exits.readings(terms, self.span) if self.exits is not None and terms is not None else 0
        if not readings:
            return float(self.span.length)
        assert self.exits is not None
        return self.span.length + readings * self.exits.head_bytes * self.span.length / self.weight_bytes

    @property
    def can_fill(self) -> bool:
        """Whether keys and values can be stored without computing the blocks (`fill_tokens`)."""
        return self.strategy.packed and self.flash is None and not self.has_states

    def new_padded_kv(self, max_length: int | None = None) -> PaddedKV:
        """An empty attention cache for the padded layout, of sequences that have `max_length` slots at most."""
        return PaddedKV(self.cut.first + self.span.length, self.cut.first, max_length=max_length)

    def text_lengths(self, parts: Sequence[StepPart]) -> AbstractContextManager[None]:
        """A context in which a packed forward computes the tokens of these parts; see `RopeLengths`."""
        return self.cut.rope.of_steps([part.layout for part in parts], self.device)

    @property
    def runs_traced(self) -> bool:
        """Whether a traced or recorded forward may run now. It knows no adapters, and no lengths of texts."""
        return active_adapters() is None and self.cut.rope.lengths is None

    @torch.inference_mode()
    def forward(
        self,
        hidden_RTH: torch.Tensor,
        cache: PaddedKV | None = None,
        pads: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        rope_lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the span over a rectangle of sequences, without gradients; see `run_padded`."""
        return self.run_padded(hidden_RTH, cache, pads, offsets, rope_lengths)

    def run_padded(
        self,
        hidden_RTH: torch.Tensor,
        cache: PaddedKV | None = None,
        pads: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        rope_lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the span over a rectangle of sequences. Without a cache, gradients find their way back.

        Shapes: R sequences, T new tokens each, H hidden size.

        Args:
            hidden_RTH: inputs in this span's dtype and on its device.
            cache: keys and values of earlier tokens; the new ones are appended. None for a forward without a past.
            pads: empty slots at the beginning of each sequence (sequences of different lengths are aligned at their
                ends); None if no sequence has any.
            offsets: added to the positions of each sequence's new tokens; None for none.
            rope_lengths: as in a `StepLayout`.

        Returns:
            outputs `[R, T, H]`; what lies in padded slots has no meaning.
        """
        sequences, new, _ = hidden_RTH.shape
        past = cache.length if cache is not None else 0
        arguments: dict[str, Any] = {
            "inputs_embeds": hidden_RTH.clone(),  # some families scale it in place
            "attention_mask": None,
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        positions = torch.arange(past, past + new, device=self.device).unsqueeze(0)
        if pads is not None and any(pads):
            pad_R1 = torch.tensor(pads, device=self.device).unsqueeze(1)
            slots_S = torch.arange(past + new, device=self.device)
            arguments["attention_mask"] = (slots_S >= pad_R1).long()
            positions = (positions - pad_R1).clamp(min=0)
        else:
            positions = positions.expand(sequences, -1)
        if offsets is not None:
            positions = positions + torch.tensor(offsets, device=self.device).unsqueeze(1)
        if self.cut.takes_positions:
            arguments["position_ids"] = positions
        try:
            self.cut.attention.use_family_attention()
            with self.cut.rope.of_rectangle(positions, rope_lengths):
                return self.cut.run(hidden_RTH, arguments)
        finally:
            if cache is not None:
                cache.length = past + new

    @torch.inference_mode()
    def forward_tokens(
        self, hidden_NH: torch.Tensor, positions: Sequence[int], batch: PackedBatch, tokens: int = 1
    ) -> torch.Tensor:
        """Run the span over packed tokens, each of which sees the past of its own sequence.

        Args:
            hidden_NH: `[tokens, hidden]`, in this span's dtype and on its device.
            positions: the position of each token, as the model is told.
            batch: which sequences the tokens belong to, and where their keys and values go.
            tokens: of each sequence, if the layers have to see a row for each; only for models that `has_states`.

        Returns:
            outputs `[tokens, hidden]`. The strategy has to be a packed one.
        """
        return self.run_packed(hidden_NH, torch.tensor(positions, device=self.device).view(-1, tokens), batch)

    @torch.inference_mode()
    def fill_tokens(self, hidden_NH: torch.Tensor, positions: Sequence[int], batch: PackedBatch) -> None:
        """Store the keys and values that packed tokens have in each block if they enter it with these hidden states.

        So a token that has left gets its keys and values in the blocks that it skips ("An Efficient Inference Framework
        for Early-exit LLMs", section 3). The arguments are those of `forward_tokens`.
        """
        positions_N1 = torch.tensor(positions, device=self.device).unsqueeze(1)
        traced = self.strategy.traced_fill
        if traced is not None and self.runs_traced:
            traced(hidden_NH.unsqueeze(1), positions_N1, batch)
            return
        for block in range(self.span.start, self.span.end):
            keys_only = KeysOnlyBatch(batch)
            with ActiveBatch(keys_only), suppress(KeysStored):
                self.narrowed(Span(block, block + 1)).run_modules(keys_only, hidden_NH.unsqueeze(1), positions_N1)
            keys_only.finish()

    def run_packed(self, hidden_NH: torch.Tensor, positions_RT: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """`forward_tokens` for positions that are on the device already. Only in inference mode."""
        flat = self.strategy.flat
        hidden_RTH = hidden_NH.reshape(*positions_RT.shape, -1)
        with ActiveBatch(batch):
            if flat is not None and self.runs_traced:
                output_RTH = flat(hidden_RTH, positions_RT)
            else:
                output_RTH = self.run_modules(batch, hidden_RTH, positions_RT)
        batch.finish(may_lack_keys=self.has_states)
        return output_RTH.flatten(0, 1)

    def run_modules(self, batch: PackedBatch, hidden_RTH: torch.Tensor, positions_RT: torch.Tensor) -> torch.Tensor:
        """`run_packed` by the family's own modules, for any kind of batch."""
        arguments: dict[str, Any] = {
            "inputs_embeds": hidden_RTH.clone(),  # some families scale it in place
            "attention_mask": None,
            "past_key_values": batch,
            "use_cache": True,
        }
        if self.cut.takes_positions:
            arguments["position_ids"] = positions_RT
        self.cut.attention.use_packed_attention()
        return self.cut.run(hidden_RTH, arguments)
