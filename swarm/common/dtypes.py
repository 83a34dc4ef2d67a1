"""The dtypes that hidden states, records and adapters may have, by name."""

from __future__ import annotations

from functools import cache

import torch

HIDDEN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def not_finite_help(dtype: str) -> str:
    """What helps a server that computes NaN or infinity in this dtype, as a clause."""
    if dtype == "float16":
        return "float16 ends at 65504, which some models exceed: start the server with --dtype bfloat16"
    return "its weights are probably damaged: download them again and restart the server"


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` becomes "float32"."""
    return str(dtype).removeprefix("torch.")
