"""Messages by which peers get a model's weights from each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm.protocol.messages.fields import Count, Message, Name

MAX_PARTS = 2050
"""Parts of the largest model: its blocks, the client's part, and its files."""

PART_PATTERN = r"\A(?:files|client|0|[1-9][0-9]{0,3})\Z"
"""Names of parts: a block's is its number."""

PartName = Annotated[str, msgspec.Meta(pattern=PART_PATTERN)]
PartDigest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class FindParts(Message, frozen=True):
    """Ask which parts of a model a peer shares. It comes first, and says what the requests behind it are about.

    Attributes:
        revision: empty for the one that the peer has.
    """

    model: Name
    revision: Name


class PartsFound(Message, frozen=True):
    """The revision that the peer has, the number of blocks of the whole model, and the digests of the parts that it
    shares."""

    revision: Name
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS - 2)]
    digests: Annotated[dict[PartName, PartDigest], msgspec.Meta(max_length=MAX_PARTS)]


class GetManifest(Message, frozen=True):
    """Ask for the manifest of a part."""

    part: PartName


class GetChunkDigests(Message, frozen=True):
    """Ask for the digests of an item's chunks."""

    part: PartName
    item: Count


class GetChunk(Message, frozen=True):
    """Ask for one chunk of an item."""

    part: PartName
    item: Count
    chunk: Count


class PartData(Message, frozen=True):
    """What was asked for, as the payload. Requests on a stream are answered in order."""
