"""Messages that send a client's adapters to a server."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm.models.adapters.adapter_config import MAX_LORA_RANK, MAX_PROMPT_LENGTH
from swarm.protocol.messages.fields import ADAPTER_DIGEST_BYTES, MAX_BLOCKS_PER_REQUEST, Count, Message, Name


class LoraShape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shape of one module's LoRA factors: A `[rank, inputs]` and B `[outputs, rank]`.

    `module` is the module's path inside the block.
    """

    module: Name
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_LORA_RANK)]
    inputs: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    outputs: Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class BlockAdapterSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Digest and shapes of one block's adapter: a soft prompt of `prompt_length` positions (0: none), LoRA modules."""

    digest: Annotated[bytes, msgspec.Meta(min_length=ADAPTER_DIGEST_BYTES, max_length=ADAPTER_DIGEST_BYTES)]
    prompt_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_LENGTH)]
    modules: Annotated[list[LoraShape], msgspec.Meta(max_length=64)]


class PutAdapters(Message, frozen=True):
    """Store adapters for this client: one for each block from `start` on, None for a block without an adapter.

    An adapter that is not used for some time is removed. A request that names a missing adapter is refused with
    `unknown_adapter`. Payload: the bytes of all adapters, in `dtype`, see `swarm.protocol.adapter_encoding`.
    """

    start: Count
    blocks: Annotated[list[BlockAdapterSpec | None], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS_PER_REQUEST)]
    dtype: Name


class AdaptersStored(Message, frozen=True):
    """The adapters are stored.

    The server keeps them for `lifetime_s` seconds after their last use, or less if it needs the memory.
    """

    lifetime_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
