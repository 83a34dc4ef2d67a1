"""Time of one block's linear layers, in ms, for each form in which a server on a CPU may hold the weights.

    python -m benchmarks.decoding.quantization [--shape 4096x11008] [--blocks 1] [--batches 1,8,32,512]

The block is that of a Llama model: four products hidden x hidden and three hidden x intermediate. With several blocks
no weight stays in the processor's cache, as in any larger model. There is one torch thread. All forms are measured
alternately, so that other load on the machine affects all of them; ratios are of the same round. `plain` is torch's own
linear layer, `prepacked` one with the weight in oneDNN's layout. The quantized forms get inputs in bfloat16.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.common.report import Report, report_parser
from swarm.models.weights.frozen_linear import ChunkedLinear, PrepackedLinear, can_prepack, replace_linears
from swarm.models.weights.packed import Grid, PackedWeight, fp4_numbers, fp8_numbers, held, word_numbers
from swarm.models.weights.quantization import INT4, INT8, quantize, weight_bytes

CPU = torch.device("cpu")
BASELINE = "fp32 plain"


@dataclass(frozen=True)
class Form:
    """A form of a block's weights.

    Attributes:
        layers: the block's linear layers.
        dtype: data type of the inputs.
    """

    name: str
    layers: nn.ModuleList
    dtype: torch.dtype


def plain(hidden: int, intermediate: int, blocks: int, dtype: torch.dtype) -> nn.ModuleList:
    """The linear layers of the blocks with random weights, the same in every dtype."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(hidden, hidden)] * 4 + [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    layers = nn.ModuleList()
    for out, into in sizes * blocks:
        layer = nn.Linear(into, out, bias=False, device="meta")
        layer.weight = nn.Parameter((torch.randn(out, into, generator=generator) / into**0.5).to(dtype), False)
        layers.append(layer)
    return layers


def forms(hidden: int, intermediate: int, blocks: int) -> list[Form]:
    """All forms that this processor can compute with."""
    found = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        layers = plain(hidden, intermediate, blocks, dtype)
        found.append(Form(f"{name} plain", layers, dtype))
        if can_prepack(dtype):
            found.append(Form(f"{name} prepacked", nn.ModuleList(map(PrepackedLinear, layers)), dtype))
        found.append(Form(f"{name} in chunks", nn.ModuleList(map(ChunkedLinear, layers)), dtype))
    for name in (INT8, INT4):
        layers = plain(hidden, intermediate, blocks, torch.bfloat16)
        quantize(layers, name, CPU)
        found.append(Form(name, layers, torch.bfloat16))
    for name, packed in (("packed FP8", fp8), ("packed MXFP4", mxfp4), ("packed int4", integers)):
        layers = plain(hidden, intermediate, blocks, torch.bfloat16)
        replace_linears(
            layers, lambda linear, pack=packed: held(pack(linear), 0, None, dtype=torch.bfloat16, device=CPU)
        )
        found.append(Form(name, layers, torch.bfloat16))
    return found


def fp8(linear: nn.Linear) -> PackedWeight:
    """FP8 with a scale for each 128 x 128 weights."""
    rows, columns = linear.weight.shape
    unit = float(linear.weight.detach().abs().max()) / 448
    scales = Grid(torch.full((1, -(-rows // 128), -(-columns // 128)), unit), 128, 128)
    return PackedWeight((linear.weight / unit).to(torch.float8_e4m3fn)[None], fp8_numbers, (rows, columns), scales)


def mxfp4(linear: nn.Linear) -> PackedWeight:
    """Random numbers of 4 bits, 32 of which have a scale of 8 bits."""
    rows, columns = linear.weight.shape
    data = torch.randint(256, (1, rows, columns // 2), dtype=torch.uint8)
    scales = Grid(torch.ones(1, rows, columns // 32, dtype=torch.float8_e8m0fnu), 1, 32)
    return PackedWeight(data, fp4_numbers, (rows, columns), scales)


def integers(linear: nn.Linear) -> PackedWeight:
    """Random integers of 4 bits, 128 of which have a scale of 16 bits."""
    rows, columns = linear.weight.shape
    data = torch.randint(-(1 << 31), 1 << 31, (1, rows, columns // 8), dtype=torch.int32)
    scales = Grid(torch.full((1, rows, columns // 128), 0.01, dtype=torch.bfloat16), 1, 128)
    numbers = partial(word_numbers, bits=4, columns=columns)
    return PackedWeight(data, numbers, (rows, columns), scales, zeros=8.0, bits=4)


def seconds(form: Form, inputs: dict[int, torch.Tensor]) -> float:
    """Time of the block's products."""
    began = time.perf_counter()
    for layer in form.layers:
        layer(inputs[layer.in_features])
    return time.perf_counter() - began


@torch.inference_mode()
def measure(report: Report, every: list[Form], batch: int) -> None:
    """Measure all forms alternately."""
    inputs = {form.name: _inputs(form, batch) for form in every}
    for form in every:
        seconds(form, inputs[form.name])  # makes oneDNN's kernels
    for _ in report.rounds(f"batch {batch}"):
        taken = {form.name: seconds(form, inputs[form.name]) for form in every}
        for form in every:
            where = f"{form.name}, {weight_bytes(form.layers) / 2**20:.0f} MiB"
            report.add(f"batch {batch}: ms", 1e3 * taken[form.name], "less", where=where)
            speedup = taken[BASELINE] / taken[form.name]
            report.add(f"batch {batch}: times {BASELINE}", speedup, "more", decides=True, where=where)


def _inputs(form: Form, batch: int) -> dict[int, torch.Tensor]:
    sizes = {layer.in_features for layer in form.layers}
    return {size: torch.randn(batch, size, dtype=form.dtype) for size in sizes}


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--shape", default="4096x11008", help="hidden x intermediate")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--batches", default="1,8,32,512")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hidden, intermediate = map(int, arguments.shape.split("x"))
    every = forms(hidden, intermediate, arguments.blocks)
    with Report(arguments) as report:
        for batch in map(int, arguments.batches.split(",")):
            measure(report, every, batch)


if __name__ == "__main__":
    main()
