"""The steps, in the order in which they run."""

from benchmarks.gpu.bench import Step
from benchmarks.gpu.steps import card, decode, engine, families, generate, graphs, pages, prefill, profile, training
from benchmarks.gpu.steps import quantization

STEPS: dict[str, Step] = {
    one.STEP.name: one.STEP
    for one in (card, pages, graphs, decode, prefill, engine, profile, families, training, quantization, generate)
}
