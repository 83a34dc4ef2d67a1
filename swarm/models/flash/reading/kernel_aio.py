"""The kernel's asynchronous reads (Linux AIO): many reads are begun by one system call and collected by another.

Called through `ctypes`, because Python's standard library has no function for them. Control blocks and events are numpy
arrays in the kernel's own format, so nothing is done per read in Python.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from typing import Protocol

import numpy as np

CONTROL_BLOCK = np.dtype(
    [
        ("data", "u8"),
        ("key", "u4"),
        ("flags", "u4"),
        ("operation", "u2"),
        ("priority", "i2"),
        ("descriptor", "u4"),
        ("address", "u8"),
        ("length", "u8"),
        ("offset", "i8"),
        ("reserved", "u8"),
        ("aio_flags", "u4"),
        ("event_descriptor", "u4"),
    ]
)
"""The kernel's `struct iocb`, little-endian. Operation 0 is a read; `data` comes back in the event."""

EVENT = np.dtype([("data", "u8"), ("control_block", "u8"), ("result", "i8"), ("result2", "i8")])
"""The kernel's `struct io_event`. `result` is the number of bytes read, or an error number below 0."""

# io_setup, io_destroy, io_getevents, io_submit
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}


class AsyncReads(Protocol):
    """The system calls. All return -errno when they fail; contexts are the kernel's numbers for queues of reads."""

    def setup(self, depth: int) -> int:
        """Create a context for `depth` reads in flight, and return it."""

    def submit(self, context: int, pointers: np.ndarray) -> int:
        """Begin the reads whose control blocks lie at these addresses, `[n]` uint64. Returns how many were accepted."""

    def collect(self, context: int, least: int, events: np.ndarray, timeout_s: float) -> int:
        """Wait for at least `least` events, write them to `events` and return how many there are.

        Returns fewer, or 0, once the time is up.
        """

    def destroy(self, context: int) -> int:
        """Remove a context. Waits until all of its reads have finished, without limit."""


class KernelAio:
    """The system calls of the running kernel. Raises `OSError` on a system without them."""

    def __init__(self) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if sys.platform != "linux" or numbers is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, "asynchronous reads are known for Linux on x86_64 and aarch64 only")
        self._setup, self._destroy, self._collect, self._submit = (ctypes.c_long(number) for number in numbers)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    def setup(self, depth: int) -> int:
        context = ctypes.c_ulong(0)
        failed = self._call(self._setup, ctypes.c_long(depth), ctypes.byref(context))
        return failed or context.value

    def submit(self, context: int, pointers: np.ndarray) -> int:
        return self._call(self._submit, ctypes.c_ulong(context), ctypes.c_long(len(pointers)), _address(pointers))

    def collect(self, context: int, least: int, events: np.ndarray, timeout_s: float) -> int:
        whole, part = divmod(timeout_s, 1.0)
        timeout = (ctypes.c_long * 2)(int(whole), int(part * 1e9))
        bounds = ctypes.c_long(min(least, len(events))), ctypes.c_long(len(events))
        return self._call(self._collect, ctypes.c_ulong(context), *bounds, _address(events), ctypes.byref(timeout))

    def destroy(self, context: int) -> int:
        return self._call(self._destroy, ctypes.c_ulong(context))

    def _call(self, *arguments: object) -> int:
        result = int(self._syscall(*arguments))
        return -ctypes.get_errno() if result < 0 else result


def _address(values: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)
