"""Which attention a model's layers use: their family's own choice, or ours over packed tokens.

The parts of a span share their layers, so they share the switch.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from swarm.models.attention.packed_attention import PACKED_IMPLEMENTATION


class AttentionSwitch:
    """The configs of a model and its layers, where transformers looks up the attention implementation."""

    def __init__(self, model: nn.Module) -> None:
        self._packed = False
        self._own: dict[int, tuple[Any, Any]] = {}
        self.include_model(model)

    def include_model(self, model: nn.Module) -> None:
        """Switch this model's configs too from now on. A copied config says what the original said."""
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal") and id(config) not in self._own:
                own = config._attn_implementation_internal
                self._own[id(config)] = config, self._first_own() if own == PACKED_IMPLEMENTATION else own

    def use_family_attention(self) -> None:
        """Let the layers use what their family chose."""
        if self._packed:
            self._packed = False
            for config, own in self._own.values():
                config._attn_implementation_internal = own

    def use_packed_attention(self) -> None:
        """Let the layers use attention over packed tokens."""
        if not self._packed:
            self._packed = True
            for config, _ in self._own.values():
                config._attn_implementation_internal = PACKED_IMPLEMENTATION

    def _first_own(self) -> Any:
        return next(own for _, own in self._own.values())
