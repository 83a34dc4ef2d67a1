"""A short digest of each block's weights, so that a client never chains servers that loaded different ones.

The digest guards against mistakes (another fine-tune under the same name, a broken download). It does not guard against
a server that lies, which could announce any digest. So large tensors are only sampled: a client can then afford to
compute the digests of all blocks from its own copy of the model. A tensor of at most `MAX_FULLY_HASHED_BYTES` is hashed
completely; of a larger one, evenly spread pages are, including the first and the last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

MAX_FULLY_HASHED_BYTES = 1 << 16
PAGE_BYTES = 4096
SAMPLED_PAGES = 4
"""Of a large tensor."""

MAX_BLOCK_PAGES = 128
"""Of all large tensors of a block. Where a block has hundreds, for experts, each gets fewer pages, or some get none."""

DIGEST_HEX_DIGITS = 12


def block_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of a block's tensors as stored in the checkpoint.

    Args:
        tensors: name inside the block (`self_attn.q_proj.weight`) to tensor, any dtype, CPU.
    """
    state = hashlib.sha256()
    ranges = sampled_ranges({name: tensor.nbytes for name, tensor in tensors.items()})
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for offset, length in ranges[name]:
            state.update(data[offset : offset + length].numpy().data)
    return state.hexdigest()[:DIGEST_HEX_DIGITS]


def sampled_ranges(sizes: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Which bytes of each tensor of a block are hashed: (offset, length), ascending. Pure.

    Args:
        sizes: in bytes, by the tensor's name.
    """
    large = sorted(name for name, size in sizes.items() if size > MAX_FULLY_HASHED_BYTES)
    pages = max(1, min(SAMPLED_PAGES, MAX_BLOCK_PAGES // max(1, len(large))))
    count = min(len(large), MAX_BLOCK_PAGES)
    looked_at = {large[len(large) * number // count] for number in range(count)}
    ranges: dict[str, list[tuple[int, int]]] = {}
    for name, size in sizes.items():
        if size <= MAX_FULLY_HASHED_BYTES:
            ranges[name] = [(0, size)] if size else []
        elif name in looked_at:
            last = size - PAGE_BYTES
            steps = max(1, pages - 1)
            ranges[name] = [(last * page // steps, PAGE_BYTES) for page in range(pages)]
        else:
            ranges[name] = []
    return ranges
