"""swarm: many people's machines running one large language model together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarm.common.version import VERSION as __version__

if TYPE_CHECKING:
    from swarm.client.config import NetworkOptions
    from swarm.client.early_exit.options import EarlyExit
    from swarm.client.model.auto_model import (
        AutoDistributedModelForCausalLM,
        AutoDistributedModelForSequenceClassification,
        AutoModelForPromptTuning,
    )
    from swarm.client.tuning.options import TuningOptions
    from swarm.ring.starter.handle import Ring

__all__ = [
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForSequenceClassification",
    "AutoModelForPromptTuning",
    "EarlyExit",
    "NetworkOptions",
    "Ring",
    "TuningOptions",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only for those who use them."""
    if name == "EarlyExit":
        from swarm.client.early_exit.options import EarlyExit

        return EarlyExit
    if name == "Ring":
        from swarm.ring.starter.handle import Ring

        return Ring
    if name in __all__:
        from swarm.client.model import auto_model as model

        return getattr(model, name)
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
