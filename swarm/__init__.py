"""swarm: many people's machines running one large language model together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarm.version import VERSION as __version__

if TYPE_CHECKING:
    from swarm.client.model import AutoDistributedModelForCausalLM

__all__ = ["AutoDistributedModelForCausalLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only for those who use them."""
    if name == "AutoDistributedModelForCausalLM":
        from swarm.client.model import AutoDistributedModelForCausalLM

        return AutoDistributedModelForCausalLM
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
