"""Triton's kernels without a GPU: interpreted, and compiled for cards that are not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

COMPILED_FOR = {80: 163 << 10, 90: 227 << 10}
"""Compute capabilities, and the shared memory in bytes that a program may have there (CUDA C++ programming guide)."""


def interpreter_of_today() -> Iterator[None]:
    """A fixture's body. Triton 3.6 turns an array of one number into an index as numpy before 2.4 allowed."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield


def compiled_shared_bytes(kernel: Any, capability: int, types: Mapping[str, str], constants: Mapping[str, Any]) -> int:
    """Bytes of shared memory of a kernel, compiled for a card of this capability.

    Args:
        types: of the arguments that are no int32.
        constants: values of those that are known when it is compiled. All others are multiples of 16, as they nearly
            always are, which lets Triton read ahead, and that takes the most memory.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and signature[name] != "fp32"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    return int(made.metadata.shared)
