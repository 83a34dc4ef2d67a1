"""Which attention the layers of a model use: the one that their family chose, or ours over packed tokens."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

from torch import nn

from swarm.models.attention.multi_session_attention import PACKED_IMPLEMENTATION


class AttentionSwitch:
    """Sets the attention implementation in the configs of a model and its layers, where transformers looks it up.

    The parts of a span share their layers, so they share the switch. It does not keep their configs alive. The
    network loop makes parts while the compute thread switches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._packed = False
        self._lock = threading.Lock()
        self._family: dict[int, tuple[weakref.ref[Any], Any]] = {}
        """By the identity of a config: the config, unless it is gone, and its family's attention."""
        self.include_model(model)

    def include_model(self, model: nn.Module) -> None:
        """Switch the configs of this model too, now and from now on.

        A copied config says what the original said when it was copied; the layers may have been switched since.
        """
        with self._lock:
            for module in model.modules():
                config: Any = getattr(module, "config", None)
                if hasattr(config, "_attn_implementation_internal") and id(config) not in self._family:
                    current = config._attn_implementation_internal
                    family = self._first_implementation() if current == PACKED_IMPLEMENTATION else current
                    forget = partial(_forget, self._family, id(config))
                    self._family[id(config)] = weakref.ref(config, forget), family
                    config._attn_implementation_internal = PACKED_IMPLEMENTATION if self._packed else family

    def use_family_attention(self) -> None:
        """Let the layers use what their family chose."""
        if self._packed:
            with self._lock:
                self._packed = False
                for config, family in self._known():
                    config._attn_implementation_internal = family

    def use_packed_attention(self) -> None:
        """Let the layers use attention over packed tokens."""
        if not self._packed:
            with self._lock:
                self._packed = True
                for config, _ in self._known():
                    config._attn_implementation_internal = PACKED_IMPLEMENTATION

    def _known(self) -> list[tuple[Any, Any]]:
        known = [(reference(), family) for reference, family in [*self._family.values()]]
        return [(config, family) for config, family in known if config is not None]

    def _first_implementation(self) -> Any:
        return next(family for _, family in self._family.values())


def _forget(family: dict[int, tuple[weakref.ref[Any], Any]], identity: int, reference: weakref.ref[Any]) -> None:
    """Drop a config that is gone, unless another one is where it was."""
    if identity in family and family[identity][0] is reference:
        del family[identity]
