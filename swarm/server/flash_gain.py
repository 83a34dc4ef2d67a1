"""Whether the swarm gains by more blocks on flash than memory holds here: `--flash auto` with `--blocks auto`."""

from __future__ import annotations

from swarm.common.files.folders import nearest_folder
from swarm.data_structures import Span
from swarm.errors import DriveFailed, InvalidOption, NotEnoughSpace, PackedFileError
from swarm.models.block_loading import return_freed_memory
from swarm.models.flash.costs.compute_speed import machine_speed
from swarm.models.flash.costs.cost_model import FlashCostModel, MachineSpeed
from swarm.models.flash.costs.flash_choice import FlashChoice, choose
from swarm.models.flash.costs.planned_costs import planned_costs, whole_bytes
from swarm.models.flash.plans.block_plan import RecordKind
from swarm.models.flash.reading.drive_measurement import measure_folder
from swarm.routing.swarm_snapshot import DEFAULT_ROUND_TRIP_S
from swarm.server.flash_budget import FlashBudget
from swarm.server.memory_budget import MemoryBudget

HOP_S = DEFAULT_ROUND_TRIP_S / 2
"""Seconds from one volunteer's server to the next: half of the round trip that routes assume of links that were not
measured. A server that starts has not measured any."""


def choose_flash(in_memory: MemoryBudget, on_flash: FlashBudget, hidden: int) -> FlashChoice | None:
    """Whether to hold more blocks on flash, where memory holds some of them but not all. None if nothing is undecided.

    Only mixtures of experts can win: streamed blocks never do, and selecting neurons is approximate. This machine is
    measured for a few seconds, but only if the answer depends on it.

    Args:
        in_memory: at least one block fits.
        on_flash: nothing in it selects neurons.
        hidden: the model's hidden size.
    """
    fitting, blocks = in_memory.blocks_that_fit(), on_flash.footprint.blocks
    mixture = next((one for one in blocks if one.plan.kind is RecordKind.EXPERTS), None)
    if mixture is None or fitting == len(blocks):
        return None
    paying = on_flash.blocks_that_pay()
    if paying <= fitting:
        return FlashChoice(False, f"{fitting} blocks fit there, and on flash no more than {paying} would pay")
    folder = on_flash.packed.folder
    try:
        wanted = on_flash.blocks_on_drive(paying)
        if wanted <= fitting:
            reason = f"{fitting} blocks fit there, and the drive of {folder.parent} has room for {wanted} on flash"
            return FlashChoice(False, reason)
        drive = measure_folder(nearest_folder(folder), on_flash.io)
    except (OSError, NotEnoughSpace, PackedFileError, DriveFailed, InvalidOption) as error:
        return FlashChoice(False, f"the speed of the drive of {folder.parent} cannot be measured: {error}")
    machine = machine_speed(drive, mixture.plan, mixture.layout, hidden)
    return_freed_memory()  # what was measured with is not in the budget
    return compare(on_flash, wanted, fitting, machine)


def compare(on_flash: FlashBudget, wanted: int, fitting: int, machine: MachineSpeed) -> FlashChoice:
    """Whether the swarm gains by `wanted` blocks on flash, of which memory holds `fitting`, on such a machine.

    Which blocks will be held is not known yet, so those count that lose most by being on flash.
    """
    times = [_seconds(on_flash, span, machine) for span in on_flash.windows(wanted)]
    memory_s, flash_s = max(times, key=lambda pair: pair[1] - pair[0])
    return choose(wanted, fitting, memory_s, flash_s, HOP_S)


def _seconds(on_flash: FlashBudget, span: Span, machine: MachineSpeed) -> tuple[float, float]:
    """Seconds of a token through a span in memory, and on flash."""
    blocks = on_flash.footprint.blocks[span.start : span.end]
    in_memory = FlashCostModel(machine, planned_costs(blocks, whole_bytes(blocks)))
    read = FlashCostModel(machine, planned_costs(blocks, on_flash.weights(span.length)))
    return in_memory.step().seconds, read.step().seconds
