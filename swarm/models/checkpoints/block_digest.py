"""A short digest of each block's weights, so that a client never chains servers that loaded different ones.

The digest guards against mistakes (another fine-tune under the same name, a broken download), not against a server
that lies: that one could announce any digest. So large tensors are sampled, which makes the digest cheap enough for
a client to check against its own copy. Tensors up to `WHOLE` bytes are hashed whole; of larger ones `PAGES` pages,
evenly spread, first and last included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

WHOLE = 1 << 20
PAGES = 256
PAGE = 4096
LENGTH = 12
"""Hex digits of a digest."""


def block_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of a block's tensors as they lie in the checkpoint.

    Args:
        tensors: name inside the block (`self_attn.q_proj.weight`) to tensor, any dtype, CPU.
    """
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        _update(state, tensor)
    return state.hexdigest()[:LENGTH]


def _update(state: hashlib._Hash, tensor: torch.Tensor) -> None:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() <= WHOLE:
        state.update(data.numpy().data)
        return
    last = data.numel() - PAGE
    for page in range(PAGES):
        offset = last * page // (PAGES - 1)
        state.update(data[offset : offset + PAGE].numpy().data)
