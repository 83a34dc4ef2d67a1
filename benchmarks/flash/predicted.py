"""What the cost model says about the blocks of OPT-6.7B, before they are measured."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.flash.files import OPT
from benchmarks.flash.matrix import NothingStore
from benchmarks.flash.opt import PLAN, RANK, empty_block, sparse_blocks
from benchmarks.flash.planted import PlantedNeurons
from benchmarks.flash.steps import PreallocatedCache, drive_speed, plain, seconds_a_token
from swarm.models.flash.costs.compute_speed import move_speed, neuron_speed, plain_speed, resident_speed
from swarm.models.flash.costs.cost_model import MachineSpeed, NeuronCosts, StreamedCosts
from swarm.models.flash.neurons.sparse_feed_forward import SparseOptions
from swarm.models.flash.reading.drive_speed import DriveSpeed
from swarm.models.flash.reading.record_reader import FlashIo
from swarm.models.flash.sparsity import Sparsity


def machine_speed(drive: DriveSpeed, dtype: torch.dtype, planted: PlantedNeurons) -> MachineSpeed:
    """Measure what the cost model needs to know of this machine."""
    layout = OPT.bundled(dtype)
    return MachineSpeed(
        drive=drive,
        resident=resident_speed(OPT.hidden, dtype),
        records=neuron_speed(PLAN, layout, nn.ReLU(), planted.active),
        move_s_per_byte=move_speed(layout),
        block_s=block_seconds(dtype, planted),
    )


TINY = replace(OPT, hidden=64, heads=1)
"""As many neurons, and next to no weights."""


def block_seconds(dtype: torch.dtype, planted: PlantedNeurons) -> float:
    """What a sparse block costs beyond its weights: the time of one that has next to none, and of attention scores."""
    steps = [plain(block) for block in tiny_blocks(dtype, planted)]
    tiny_s = min(seconds_a_token(steps, TINY_TOKENS // 4, 1, dtype, TINY) for _ in range(4))
    return tiny_s + scores_seconds(dtype)


@torch.inference_mode()
def scores_seconds(dtype: torch.dtype) -> float:
    """The time of a token's attention scores over the cache, which the block without weights does not have."""
    cache = PreallocatedCache(1, 1, TINY_TOKENS, dtype, OPT)
    query, keys, values = torch.randn(3, 1, OPT.heads, 1, OPT.hidden // OPT.heads).to(dtype)
    times = []
    for _ in range(TINY_TOKENS):
        began = time.perf_counter()
        scaled_dot_product_attention(query, *cache.update(keys, values, 0))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def tiny_blocks(dtype: torch.dtype, planted: PlantedNeurons) -> list[nn.Module]:
    """One sparse block with next to no weights, for `TINY_TOKENS` tokens."""
    block = empty_block(0, dtype, planted.active, TINY)
    for name, size in TINY.attention.items():
        path, _, own = name.rpartition(".")
        block.get_submodule(path)._parameters[own] = nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)
    options = SparseOptions(round(planted.needed(5) * TINY.neurons))
    sparse = sparse_blocks([block], [planted.draw(TINY.neurons, 0)], [NothingStore(TINY.bundled(dtype))], options, TINY)
    sparse.draw(TINY_TOKENS)
    return sparse.blocks


TINY_TOKENS = 64
BATCHES = (2, 4, 8)
"""Sequences that are computed together."""


def batch_name(sequences: int) -> str:
    """Of the row."""
    return f"flash, {sequences} sequences"


@dataclass(frozen=True)
class Setting:
    """What is compared.

    Attributes:
        memory: bytes for the weights of the blocks on flash, attention and predictors included.
    """

    folder: Path
    dtype: torch.dtype
    layers: int
    planted: PlantedNeurons
    io: FlashIo
    memory: int


def half_the_memory(dtype: torch.dtype, layers: int) -> int:
    """Half of what the blocks take."""
    return layers * OPT.whole(dtype).stride // 2


def neuron_slots(setting: Setting) -> int:
    """Neurons of a block that memory has room for beside attention and predictor."""
    return slots_for(setting.memory, setting.layers, setting.dtype)


def slots_for(memory: int, layers: int, dtype: torch.dtype) -> int:
    """Neurons of one of so many blocks that `memory` bytes have room for beside attention and predictors."""
    attention = sum(math.prod(size) for size in OPT.attention.values()) * dtype.itemsize
    left = memory // layers - attention - predictor_bytes(dtype)
    return left // OPT.bundled(dtype).stride


def predictor_bytes(dtype: torch.dtype) -> int:
    return RANK * (OPT.hidden + OPT.neurons) * dtype.itemsize


@cache
def planted_sparsity(planted: PlantedNeurons) -> Sparsity:
    """As a predictor's file would have it."""
    return planted.sparsity((1, *BATCHES))


def predictions(setting: Setting) -> dict[str, float]:
    """Seconds a token of all 32 blocks, by the cost model, for each row, as fast as the machine is now."""
    stride = OPT.bundled(setting.dtype).stride
    drive = drive_speed(setting.folder / f"0-bundled-{setting.dtype.itemsize}.bin", setting.io, stride)
    machine, whole = machine_speed(drive, setting.dtype, setting.planted), OPT.whole(setting.dtype).stride
    plain_machine = replace(machine, records=plain_speed(OPT.hidden, setting.dtype))
    attention = sum(math.prod(size) for size in OPT.attention.values()) * setting.dtype.itemsize
    resident = attention + predictor_bytes(setting.dtype)
    sparsity = planted_sparsity(setting.planted)
    sparse = NeuronCosts(resident, stride, OPT.neurons, sparsity, neuron_slots(setting))
    read = StreamedCosts(0, whole).step(plain_machine, 1, 1)
    dense_s = machine.block_s + machine.resident.seconds(whole)
    copied = replace(machine, drive=CopySpeed(machine.move_s_per_byte))
    blocks = {
        "naive": read.reading_s + read.computing_s,
        "naive, reading ahead": read.seconds,
        "hybrid": (read.reading_s + read.computing_s + dense_s) / 2,
        # While one block is read, the one before and one in memory compute.
        "hybrid, reading ahead": max(read.reading_s, read.computing_s + dense_s) / 2,
        "flash": sparse.step(machine, 1, 1).seconds,
        "the same in memory": sparse.step(copied, 1, 1).seconds,
        "dense in memory": dense_s,
        **{batch_name(count): sparse.step(machine, 1, count).seconds / count for count in BATCHES},
    }
    return {name: OPT.layers * seconds for name, seconds in blocks.items()}


@dataclass(frozen=True)
class CopySpeed:
    """The speed of a store that has everything in memory, as the cost model takes it."""

    s_per_byte: float

    def seconds(self, reads: float, bytes_each: float) -> float:
        return reads * bytes_each * self.s_per_byte
