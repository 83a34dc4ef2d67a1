"""A span: the transformers base model of a family with its list of layers cut down.

The family's own forward computes masks, position embeddings and per-layer arguments. Received hidden states are put in
front of the first layer, and what the last layer returns is taken out, so whatever the family does before and after
(embedding scale, learned positions, final norm) has no effect here: that is the client's part.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from swarm.data_structures import Span
from swarm.errors import InvalidSpan
from swarm.models.adapters.adapter_batch import active_adapters
from swarm.models.adapters.layer_hooks import AdaptedLayers
from swarm.models.attention.attention_switch import AttentionSwitch
from swarm.models.attention.packed_attention import PackedBatch, running_batch
from swarm.models.attention.padded_kv import PaddedKV
from swarm.models.attention.paged_attention import PagedAttention
from swarm.models.cutting import surgery
from swarm.models.execution.cuda_graphs import DecodeGraphs
from swarm.models.execution.traced_forward import TokenForward
from swarm.models.weights.quantization import weight_bytes


class SpanModel:
    """The blocks of one span, ready to compute. Make one with `span_loading.load_span`.

    Attributes:
        span: which blocks.
        family: the config's `model_type`.
        module: the cut transformers model.
        hidden_size: width of the hidden states.
        dtype, device: what it computes in, and where.
        digests: one a block, see `swarm.models.checkpoints.block_digest`.
        weight_bytes: memory that the weights take, in whatever form they are held.
        positions: how many positions the model's tables hold, or None if it computes any position.
        packed: whether tokens of many sessions can be computed together by `forward_tokens`; decided by
            `swarm.models.execution.strategy` for the whole span, and never changed once a session is open.
        paging: where rows lie if they lie in pages; None if each session keeps its own. Decided with `packed`.
        graphs: decode steps as recorded graphs, see `swarm.models.execution.cuda_graphs`; None if nothing is recorded.
        captured: the same as a flat function (`traced_forward`); None to run the family's modules.
        adapted: the layers, where adapters are added to them.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        span: Span,
        digests: list[str],
        hidden_size: int,
        first: int = 0,
        attention: AttentionSwitch | None = None,
        adapted: AdaptedLayers | None = None,
    ) -> None:
        self.span = span
        self.hidden_size = hidden_size
        self.digests = digests
        self._path = path
        self.module = model
        layers = self.layers
        self._first = first  # number of the first layer in the span that the weights were loaded for
        self._narrowed: dict[Span, SpanModel] = {span: self}
        # Not the parameters' dtype: quantized weights are integers.
        self.dtype: torch.dtype = model.config.dtype  # type: ignore[union-attr, assignment]
        self.device = next(layers.parameters()).device
        self.weight_bytes = weight_bytes(model)
        self.family: str = model.config.model_type  # type: ignore[union-attr, assignment]
        self._attention = attention or AttentionSwitch(model)
        self.adapted = adapted or AdaptedLayers(layers, span.start, hidden_size)
        self.packed = False
        self.paging: PagedAttention | None = None
        self.graphs: DecodeGraphs | None = None
        self.captured: TokenForward | None = None
        self.positions = _table_length(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._received: torch.Tensor | None = None
        self._produced: torch.Tensor | None = None
        # Before hooks that add to a layer's inputs, which may have been there for a wider span.
        layers[0].register_forward_pre_hook(self._put_in, with_kwargs=True, prepend=True)
        layers[-1].register_forward_hook(self._take_out)

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks' own modules."""
        layers: Any = self.module.get_submodule(self._path)
        return cast(nn.ModuleList, layers)

    def new_padded_kv(self) -> PaddedKV:
        """An empty attention cache for this span."""
        return PaddedKV(self._first + self.span.length, self._first)

    def narrowed(self, span: Span) -> SpanModel:
        """Part of this span as a span of its own, sharing the weights. Raises `InvalidSpan` if it is no part of it."""
        if span not in self._narrowed:
            if not self.span.start <= span.start < span.end <= self.span.end:
                raise InvalidSpan(f"blocks {span} are no part of {self.span}")
            start, end = span.start - self.span.start, span.end - self.span.start
            model = surgery.slice_model(self.module, self._path, start, end)
            digests = self.digests[start:end]
            self._attention.include_model(model)
            first = self._first + start
            part = SpanModel(model, self._path, span, digests, self.hidden_size, first, self._attention, self.adapted)
            part.packed, part.paging = self.packed, self.paging
            part.graphs = DecodeGraphs(part, self.graphs.record) if self.graphs is not None else None
            self._narrowed[span] = part
        return self._narrowed[span]

    @torch.inference_mode()
    def forward(
        self,
        hidden_RTH: torch.Tensor,
        cache: PaddedKV | None = None,
        pads: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the span over a rectangle of rows, for which no gradients are wanted; see `run_padded`."""
        return self.run_padded(hidden_RTH, cache, pads, offsets)

    def run_padded(
        self,
        hidden_RTH: torch.Tensor,
        cache: PaddedKV | None = None,
        pads: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the span over a rectangle of rows. Without a cache, gradients find their way back.

        Shapes: R rows, T new tokens a row, H hidden size.

        Args:
            hidden_RTH: inputs in this span's dtype and on its device.
            cache: keys and values of earlier tokens; the new ones are appended. None for a forward without a past.
            pads: slots at the beginning of each row that hold nothing (rows of different lengths are aligned at their
                ends); None if no row has any.
            offsets: added to the positions of each row's new tokens; None for none.

        Returns:
            outputs `[R, T, H]`; what lies in padded slots has no meaning.
        """
        rows, new, _ = hidden_RTH.shape
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
        elif rows > 1:
            positions = positions.expand(rows, -1)
        if offsets is not None:
            positions = positions + torch.tensor(offsets, device=self.device).unsqueeze(1)
        if self._takes_positions:
            arguments["position_ids"] = positions
        try:
            self._attention.use_family_attention()
            return self._run(hidden_RTH, arguments)
        finally:
            if cache is not None:
                cache.length = past + new

    @torch.inference_mode()
    def forward_tokens(self, hidden_NH: torch.Tensor, positions: Sequence[int], batch: PackedBatch) -> torch.Tensor:
        """Run the span over single tokens, each of which sees its own row's past.

        Args:
            hidden_NH: `[tokens, hidden]`, in this span's dtype and on its device.
            positions: what the model is told of each token's place.
            batch: whose the tokens are, and where keys and values go.

        Returns:
            outputs `[tokens, hidden]`. Only for spans that are `packed`.
        """
        return self.run_packed(hidden_NH, torch.tensor(positions, device=self.device).unsqueeze(1), batch)

    def run_packed(self, hidden_NH: torch.Tensor, positions_N1: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """`forward_tokens` for positions that are on the device already. Only in inference mode."""
        with running_batch(batch):
            if self.captured is not None and active_adapters() is None:  # what is captured knows no adapters
                output_N1H = self.captured(hidden_NH.unsqueeze(1), positions_N1)
            else:
                output_N1H = self.run_tokens(batch, hidden_NH.unsqueeze(1), positions_N1)
        batch.require_attention_called()
        return output_N1H.squeeze(1)

    def run_tokens(self, batch: PackedBatch, hidden_N1H: torch.Tensor, positions_N1: torch.Tensor) -> torch.Tensor:
        """`forward_tokens` by the family's own modules, whatever stands for the batch."""
        arguments: dict[str, Any] = {
            "inputs_embeds": hidden_N1H.clone(),  # some families scale it in place
            "attention_mask": None,
            "past_key_values": batch,
            "use_cache": True,
        }
        if self._takes_positions:
            arguments["position_ids"] = positions_N1
        self._attention.use_packed_attention()
        return self._run(hidden_N1H, arguments)

    def _run(self, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        self._received = hidden
        try:
            self.module(**arguments)
            assert self._produced is not None
            return self._produced
        finally:
            self._received = self._produced = None

    def _put_in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._received is None:
            return None  # the layer runs for a wider or a narrower span
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}

    def _take_out(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._received is not None:
            self._produced = output[0] if isinstance(output, tuple) else output


def _table_length(model: Any) -> int | None:
    """Rows of a table that the model indexes by position (such as GPT-J's sines), if it has one."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    for module in model.modules():
        for value in (*vars(module).values(), *module.buffers(recurse=False)):
            if isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[0] == limit:
                return limit
    return None
