"""Which code has never run on a card: every function of the product that is only for one.

    python -m benchmarks.gpu.unproven

prints the table of `docs/gpu.md`, found in the source: functions that name CUDA, bitsandbytes, Triton or torch's
attention over pages, and of kernels in Triton every line. What stands in for a card on a processor reaches most of
them; it does not reach those in `NOT_REACHED`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.tables import table

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("bitsandbytes", "cuda", "triton", "varlen_attn")

NOT_REACHED = {
    "models.weights.bitsandbytes_linear": "runs on a processor, through the same classes of bitsandbytes",
    "models.weights.triton_products": "Triton's interpreter, on a processor where Triton is installed",
    "models.weights.gpu_linears._by_triton": "Triton's interpreter, on a processor where Triton is installed",
    "models.attention.triton_attention": "Triton's interpreter, on a processor where Triton is installed",
    "models.execution.trials.exit_trials._fills_faster": "nothing: exits inside a span are tried on processors",
    "cli.doctor.machine_checks._cuda_driver_version": "nothing: a CPU build of torch has no driver",
    "cli.doctor.verdicts": "a processor, the same lines",
    "client.threads": "nothing: clients compute on processors",
    "protocol.compression": "a processor, through the same functions of bitsandbytes",
}
"""Beginnings of names, and what is done instead."""


@dataclass(frozen=True)
class OnlyForCards:
    """A function that is only for cards, or has lines that are.

    Attributes:
        name: without the package's name.
        lines: how many of its lines name CUDA; of a kernel, all.
    """

    name: str
    lines: int

    @property
    def instead(self) -> str:
        """What runs it without a card."""
        found = [said for beginning, said in NOT_REACHED.items() if self.name.startswith(beginning)]
        return found[0] if found else "the stand-in"


def functions() -> list[OnlyForCards]:
    """All of them, by name."""
    found = []
    for path in sorted((ROOT / "swarm").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "swarm").with_suffix("").parts)
        text = path.read_text()
        lines = text.splitlines()
        for name, node in _functions(ast.parse(text), module):
            docstring = ast.get_docstring(node, clean=False) or ""
            body = [line for line in lines[node.lineno - 1 : node.end_lineno] if line.strip() not in docstring]
            kernel = any("triton" in ast.unparse(one) for one in node.decorator_list)
            count = sum(bool(line.strip()) if kernel else _names_a_card(line) for line in body)
            if count:
                found.append(OnlyForCards(name, count))
    return found


def _names_a_card(line: str) -> bool:
    code = line.partition("  #")[0].lower()
    return any(word in code for word in WORDS) and not code.strip().startswith(("#", '"""'))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with their names; what is inside a function belongs to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}.{child.name}")


def markdown() -> str:
    """The table for `docs/gpu.md`."""
    return table(
        ("function", "lines that name a card", "what runs it without one"),
        [(f"`{one.name}`", str(one.lines), one.instead) for one in functions()],
    )


if __name__ == "__main__":
    print(markdown())
