"""The dtypes that hidden states, records and adapters may have, by name."""

from __future__ import annotations

import torch

HIDDEN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` becomes "float32"."""
    return str(dtype).removeprefix("torch.")
