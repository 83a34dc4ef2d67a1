"""Digests of a hub model's blocks, read from its own files: only the bytes that the digests cover are fetched.

A safetensors file begins with a header that says where each tensor lies (8 bytes with its length, then JSON), so
ranges of the file can be asked for over HTTP. Files of one commit never change, so this is done once for a commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import urlsplit

from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from swarm.errors import CheckpointError
from swarm.models.checkpoints.block_digest import digest_of, sampled_ranges
from swarm.models.checkpoints.safetensors_header import StoredTensor, header_length, parse_header

READERS = 16
"""Requests at the same time."""

HEADER_GUESS_BYTES = 1 << 16
"""Of a file, asked for first: most headers fit."""

MAX_GAP_BYTES = 1 << 15
MAX_REQUEST_BYTES = 1 << 20
"""Ranges that lie so near to each other are asked for together, up to so much."""

REQUEST_TIMEOUT_S = 20.0
ATTEMPTS = 3
RETRY_DELAY_S = 1.0


class RangedFiles(Protocol):
    """Files of which parts can be read. May be called in several threads."""

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset` on; fewer only at the file's end. Raises `CheckpointError`."""


class HubFiles:
    """Files of one commit of a hub repository, over HTTP; implements `RangedFiles`.

    A hub answers few requests of one address (HTTP 429), and redirects them to where it keeps its files. So it is asked
    once for each file.

    Args:
        endpoint: of the hub; None for the usual one.
    """

    def __init__(self, repository: str, commit: str, endpoint: str | None = None) -> None:
        self._repository, self._commit, self._endpoint = repository, commit, endpoint
        self._stores: dict[str, str] = {}
        """Where the hub has redirected to, by file. Such a URL expires."""

    def read(self, file: str, offset: int, length: int) -> bytes:
        for attempt in range(ATTEMPTS):
            store = self._stores.get(file)
            try:
                return self._fetch(file, store, offset, length)
            except CheckpointError:
                raise
            except Exception as error:  # which HTTP library it is, and so its errors, is the hub library's choice
                if attempt == ATTEMPTS - 1:
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    raise CheckpointError(f"{file} of {self._repository} cannot be read: {reason}") from error
                if store is not None and self._stores.get(file) == store:
                    self._stores.pop(file, None)
            time.sleep(RETRY_DELAY_S * (attempt + 1))
        raise AssertionError("unreachable")

    def _fetch(self, file: str, store: str | None, offset: int, length: int) -> bytes:
        hub = hf_hub_url(self._repository, file, revision=self._commit, endpoint=self._endpoint)
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        if store is None:
            headers |= build_hf_headers()  # with the user's token, which is for the hub only
        data, found = _fetch_range(store or hub, headers, length)
        if store is None and urlsplit(found).netloc != urlsplit(hub).netloc:
            self._stores[file] = found
        return data


def _fetch_range(url: str, headers: Mapping[str, str], length: int) -> tuple[bytes, str]:
    """One request: the data, and the URL that it came from. Reads no more than was asked for, whatever is sent."""
    parts, size = [], 0
    with get_session().stream("GET", url, headers=dict(headers), timeout=REQUEST_TIMEOUT_S) as response:
        response.raise_for_status()
        if response.status_code != 206:
            raise CheckpointError("the model hub does not let parts of files be read; give a file of digests instead")
        for part in response.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > length:
                raise CheckpointError("the model hub sends more than was asked for")
        return b"".join(parts), str(response.url)


def hub_block_digests(
    files: RangedFiles, weight_map: Mapping[str, str], blocks: Sequence[Mapping[str, str]]
) -> list[str]:
    """The digest of each block.

    Args:
        weight_map: the file of each tensor.
        blocks: for each block, the names of its tensors in the checkpoint, and their names inside the block.

    Raises:
        CheckpointError: a file cannot be read, or is not what the index says.
    """
    with ThreadPoolExecutor(READERS, thread_name_prefix="swarm-digests") as pool:
        needed = sorted({weight_map[name] for block in blocks for name in block})
        headers = dict(zip(needed, pool.map(lambda file: read_hub_header(files, file), needed), strict=True))
        forms = [_block_forms(block, weight_map, headers) for block in blocks]
        ranges: set[tuple[str, int, int]] = set()
        for block in forms:
            sampled = sampled_ranges({name: stored.form.size_bytes for name, (_, stored) in block.items()})
            ranges |= {
                (block[name][0], block[name][1].offset + offset, length)
                for name, found in sampled.items()
                for offset, length in found
            }
        data = _read_all(files, ranges, pool.map)
    return [_digest(block, data) for block in forms]


BlockForms = Mapping[str, tuple[str, StoredTensor]]
"""By a tensor's name inside the block: its file, and where it is there."""


def _digest(block: BlockForms, data: Mapping[tuple[str, int, int], bytes]) -> str:
    def read(name: str, offset: int, length: int) -> bytes:
        file, stored = block[name]
        return data[file, stored.offset + offset, length]

    return digest_of({name: stored.form for name, (_, stored) in block.items()}, read)


def _block_forms(
    block: Mapping[str, str], weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, StoredTensor]]
) -> BlockForms:
    forms = {}
    for name, inside in block.items():
        file = weight_map[name]
        if name not in headers[file]:
            raise CheckpointError(f"{file} does not hold the tensor {name[:200]}, although the index says so")
        forms[inside] = (file, headers[file][name])
    return forms


def read_hub_header(files: RangedFiles, file: str) -> Mapping[str, StoredTensor]:
    """The tensors of one file. Raises `CheckpointError`."""
    try:
        data = files.read(file, 0, HEADER_GUESS_BYTES)
        length = header_length(data)
        if length > len(data):
            data += files.read(file, len(data), length - len(data))
        return parse_header(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


def _read_all(
    files: RangedFiles,
    ranges: Iterable[tuple[str, int, int]],
    run: Callable[[Callable[[list[tuple[str, int, int]]], Any], Iterable[list[tuple[str, int, int]]]], Iterable[Any]],
) -> dict[tuple[str, int, int], bytes]:
    """The bytes of every range (file, offset, length); several that lie near each other in one request."""

    def fetch(group: list[tuple[str, int, int]]) -> dict[tuple[str, int, int], bytes]:
        file, first, _ = group[0]
        end = max(offset + length for _, offset, length in group)
        data = files.read(file, first, end - first)
        if len(data) != end - first:
            raise CheckpointError(f"{file} is shorter than its header says")
        return {(file, offset, length): data[offset - first :][:length] for _, offset, length in group}

    found: dict[tuple[str, int, int], bytes] = {}
    for part in run(fetch, near_ranges(ranges)):
        found |= part
    return found


def near_ranges(ranges: Iterable[tuple[str, int, int]]) -> list[list[tuple[str, int, int]]]:
    """Ranges (file, offset, length) in groups that are read at once. Pure."""
    groups: list[list[tuple[str, int, int]]] = []
    for file, offset, length in sorted(ranges):
        if groups and groups[-1][0][0] == file:
            first, end = groups[-1][0][1], max(start + size for _, start, size in groups[-1])
            if offset - end <= MAX_GAP_BYTES and max(end, offset + length) - first <= MAX_REQUEST_BYTES:
                groups[-1].append((file, offset, length))
                continue
        groups.append([(file, offset, length)])
    return groups
