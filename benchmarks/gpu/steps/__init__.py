"""The steps, in the order in which they run."""

from benchmarks.gpu.bench import Step
from benchmarks.gpu.steps import (
    card,
    decode,
    engine,
    families,
    generate,
    graphs,
    pages,
    prefill,
    profile,
    quantization,
    training,
)

STEPS: dict[str, Step] = {
    one.STEP.name: one.STEP
    for one in (card, pages, graphs, families, training, quantization, decode, generate, prefill, engine, profile)
}
