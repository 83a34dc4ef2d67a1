"""A short digest of each block's weights, so that a client never chains servers that loaded different ones.

The digest guards against mistakes (another fine-tune under the same name, a broken download). It does not guard against
a server that lies, which could announce any digest. So large tensors are only sampled: a client can then afford to
check the digest against its own copy of the weights. A tensor of at most `MAX_FULLY_HASHED_BYTES` is hashed completely;
of a larger one, `SAMPLED_PAGES` evenly spread pages are hashed, including the first and the last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

MAX_FULLY_HASHED_BYTES = 1 << 20
SAMPLED_PAGES = 256
PAGE_BYTES = 4096
DIGEST_HEX_DIGITS = 12


def block_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of a block's tensors as stored in the checkpoint.

    Args:
        tensors: name inside the block (`self_attn.q_proj.weight`) to tensor, any dtype, CPU.
    """
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        _update(state, tensor)
    return state.hexdigest()[:DIGEST_HEX_DIGITS]


def _update(state: hashlib._Hash, tensor: torch.Tensor) -> None:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() <= MAX_FULLY_HASHED_BYTES:
        state.update(data.numpy().data)
        return
    last = data.numel() - PAGE_BYTES
    for page in range(SAMPLED_PAGES):
        offset = last * page // (SAMPLED_PAGES - 1)
        state.update(data[offset : offset + PAGE_BYTES].numpy().data)
