"""What there is to know about a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 1 for another device."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(properties.multi_processor_count) if properties is not None else 1
