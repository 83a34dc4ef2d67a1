"""Writing a block's packed files: large direct writes, digests on the way, no second copy of the block."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from safetensors.torch import save

from swarm.models.flash.files.block_files import UNFINISHED
from swarm.models.flash.files.manifest import FileContent, PartDigests
from swarm.models.flash.records import RECORD_ALIGNMENT, RecordBuffer, RecordLayout, allocate_aligned

WRITE_BYTES = 16 << 20
"""Bytes of one write, and of the records that are put together in memory. A multiple of `RECORD_ALIGNMENT`."""

_DIRECT = getattr(os, "O_DIRECT", 0)


def record_bytes(layout: RecordLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of the records file in order, as uint8 tensors that are valid until the next one is asked for.

    Small records are put together in a buffer of `WRITE_BYTES`; of a large one, each field is given as it lies in its
    tensor.
    """
    if layout.stride < WRITE_BYTES:
        yield from _bytes_of_small_records(layout, tensors)
    else:
        yield from _bytes_of_large_records(layout, tensors)


def _bytes_of_small_records(layout: RecordLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    slots = min(WRITE_BYTES // layout.stride, layout.count)
    buffer = RecordBuffer(layout, slots)
    buffer.data.zero_()  # what lies between fields is written too
    parts = {field.tensor: field.parts(tensors[field.tensor]) for field in layout.fields}
    for start in range(0, layout.count, slots):
        number = min(slots, layout.count - start)
        for tensor, parts_of_tensor in parts.items():
            part = parts_of_tensor[start : start + number]
            buffer.field(tensor)[:number].copy_(part if part.dim() > 1 else part.unsqueeze(1))
        yield buffer.data[:number].view(-1)


def _bytes_of_large_records(layout: RecordLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    for record in range(layout.count):
        written = 0
        for field in layout.fields:
            if field.offset > written:
                yield torch.zeros(field.offset - written, dtype=torch.uint8)
            part = _bytes_of(field.parts(tensors[field.tensor])[record])
            yield part
            written = field.offset + part.numel()
        if layout.stride > written:
            yield torch.zeros(layout.stride - written, dtype=torch.uint8)


def safetensors_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of a safetensors file, which are written as all others: `save_file` only says in words that a drive is
    full, and leaves a file under a name of its own if it is killed."""
    data = save(
        {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )
    yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


def write_file(
    path: Path, pieces: Iterable[torch.Tensor], progress: Callable[[int], object] = lambda size: None
) -> FileContent:
    """Write a file that is there completely or not at all, even if the power fails. Returns what it holds.

    Past the page cache where the file system can do that: it is faster, and reading the file back asks the drive.

    Args:
        pieces: the bytes in order; each piece may change when the next one is asked for.
        progress: called with the bytes of each write.

    Raises `OSError`; nothing is left of the file then.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    digests, size = PartDigests(), 0
    try:
        descriptor = _opened(unfinished)
        try:
            # Two threads write and hash while this one puts the next bytes together: all let go of the interpreter.
            with ThreadPoolExecutor(2, "swarm-writing") as pool:
                jobs: list[Future[None]] = []
                for data in _aligned(pieces):
                    _finish(jobs)
                    jobs = [pool.submit(_write_all, descriptor, data), pool.submit(digests.update, data)]
                    size += len(data)
                    progress(len(data))
                _finish(jobs)
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return FileContent(size, digests.finish())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder permanent. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aligned(pieces: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The same bytes in writes of `WRITE_BYTES`, the last one shorter, from memory that is aligned for direct writes.

    A write stays as it is until the one after the next is asked for.
    """
    buffers = itertools.cycle(allocate_aligned(WRITE_BYTES) for _ in range(2))
    buffer, filled = next(buffers), 0
    for piece in pieces:
        while len(piece):
            count = min(len(piece), WRITE_BYTES - filled)
            buffer[filled : filled + count] = piece[:count]
            piece, filled = piece[count:], filled + count
            if filled == WRITE_BYTES:
                yield buffer.numpy().data
                buffer, filled = next(buffers), 0
    if filled:
        yield buffer[:filled].numpy().data


def _finish(jobs: Iterable[Future[None]]) -> None:
    """Wait for all of them, then raise what the first one raised."""
    wait(jobs)
    for job in jobs:
        job.result()


def _opened(path: Path) -> int:
    """A new file that is written past the page cache where that can be done."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        if len(data) % RECORD_ALIGNMENT:  # the end of a file; or the rest of a write that was cut short
            _write_cached(descriptor)
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _write_cached(descriptor):
                raise  # some file systems say no to direct writes only here


def _write_cached(descriptor: int) -> bool:
    """Write through the page cache from now on. Returns whether that is a change."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in order, as bytes; copied only if they lie in another order."""
    values = tensor.detach().contiguous().view(-1)
    if values.stride(0) != 1:  # a single value that was cut from a tensor counts as contiguous
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)
