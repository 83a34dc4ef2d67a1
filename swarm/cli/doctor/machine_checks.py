"""Checks of this machine: each function inspects one thing and passes what it found to `verdicts`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from swarm.cli.doctor import verdicts
from swarm.cli.doctor.verdicts import Finding
from swarm.common.files.folders import nearest_folder
from swarm.common.version import VERSION
from swarm.errors import DriveFailed, InvalidOption, NotEnoughSpace, SwarmError

TRIED_HIDDEN, TRIED_BLOCKS = 1024, 4
"""Size of the blocks with which a GPU is tried: 100 MB in all."""

PACKAGES = ("torch", "transformers", "hivemind")


def check_software() -> Iterator[Finding]:
    """Check Python, this package, and its most important dependencies."""
    yield verdicts.python(sys.version_info[:3])
    yield verdicts.ok("swarm", VERSION)
    required = _required_packages()
    for name in PACKAGES:
        requirement = required.get(name)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        fits = version is None or requirement is None or requirement.specifier.contains(version, prereleases=True)
        yield verdicts.package(name, version, str(requirement.specifier) if requirement else "", fits)


def _required_packages() -> dict[str, Requirement]:
    """The requirements in this package's metadata; empty if the package is not installed."""
    try:
        lines = metadata.requires("swarm") or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found[requirement.name.lower()] = requirement
    return found


def check_cpu() -> Finding:
    """Report the cores that this process may use."""
    import torch

    cores = len(os.sched_getaffinity(0))
    return verdicts.ok("CPU", f"{cores} cores ({platform.machine()}), torch uses {torch.get_num_threads()} threads")


def check_gpu(requested: str) -> Finding:
    """Check whether torch can use a GPU. `requested` is the value of --device."""
    import torch

    from swarm.server.memory_budget import resolve_device

    try:
        device = resolve_device(requested)
    except InvalidOption as error:
        return verdicts.failure("GPU", str(error), "leave out --device to use what there is")
    if device.type != "cuda":
        return verdicts.no_gpu(Path("/proc/driver/nvidia/version").exists(), torch.version.cuda)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    capability = properties.major, properties.minor
    return verdicts.gpu(properties.name, total, free, capability, _cuda_driver_version())


def computes_on_gpu(requested: str) -> bool:
    """Whether blocks would be computed on a GPU. `requested` is the value of --device."""
    from swarm.server.memory_budget import resolve_device

    try:
        return resolve_device(requested).type == "cuda"
    except InvalidOption:  # `check_gpu` reports it
        return False


def check_execution(requested: str) -> Finding:
    """Find out how this GPU computes blocks, with a few blocks of random weights."""
    import torch

    from swarm.models.execution.strategy_choice import choose_forward, choose_layout
    from swarm.models.loading.random_span import llama_config, make_random_span
    from swarm.server.memory_budget import resolve_device

    config = llama_config(TRIED_HIDDEN, 3 * TRIED_HIDDEN, TRIED_HIDDEN // 64, TRIED_HIDDEN // 64, TRIED_BLOCKS)
    span = make_random_span(config, dtype=torch.bfloat16, device=resolve_device(requested))
    found = choose_forward(choose_layout(span)).strategy
    return verdicts.execution(str(found), found.graph_recorder is not None)


def _cuda_driver_version() -> str:
    import torch

    try:
        number = int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]  # CUDA builds only
    except (AttributeError, RuntimeError):
        return ""
    return f"{number // 1000}.{number % 1000 // 10}"


def check_model(model: str | None, requested: str) -> Finding:
    """Check whether the model can be served, and how many of its blocks fit into memory, in each form of weights."""
    from swarm.models.checkpoints.checkpoint import open_checkpoint
    from swarm.models.checkpoints.footprint import memory_footprint
    from swarm.models.checkpoints.packed_weights import quantization_of
    from swarm.models.checkpoints.partial_loading import resolve_dtype
    from swarm.models.weights.quantization import INT8, NF4, PACKED, form_for_device, require_available
    from swarm.server.limits import DEFAULT_CACHE_TOKENS
    from swarm.server.memory_budget import MemoryBudget, free_memory, resolve_device, session_buffer_bytes

    try:
        device = resolve_device(requested)
        free, checkpoint = free_memory(device), open_checkpoint(model)
        dtype = resolve_dtype("auto", checkpoint.config)
        buffers = session_buffer_bytes(checkpoint, device, dtype, DEFAULT_CACHE_TOKENS)
        needs = {str(dtype).removeprefix("torch."): memory_footprint(checkpoint, dtype)}
    except SwarmError as error:
        return verdicts.failure("Model", str(error), "give another MODEL, or none for the demo model")
    for quant in (PACKED, INT8, NF4):
        form = form_for_device(device, quant)
        with suppress(InvalidOption):  # this machine cannot hold weights in this form, or they are not packed
            require_available(form, device)
            needs[quant] = memory_footprint(checkpoint, dtype, form)
    budgets = {form: MemoryBudget(one, max(0, free - buffers), DEFAULT_CACHE_TOKENS) for form, one in needs.items()}
    fitting = {form: budget.fitting_blocks(None) for form, budget in budgets.items()}
    packed = quantization_of(checkpoint.config)
    method = packed.get("quant_method", "MLX") if isinstance(packed, dict) else None
    kind = checkpoint.config.model_type + (f" packed by {str(method)[:32]}" if method else "")
    return verdicts.model(checkpoint.name, kind, checkpoint.blocks, fitting, free, DEFAULT_CACHE_TOKENS)


def check_disk() -> Finding:
    """Check the folder for files from the hub."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    existing = nearest_folder(folder)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return verdicts.disk(str(folder), shutil.disk_usage(existing).free, writable)


def check_drive() -> Finding:
    """Measure the drive on which packed files of weights would lie, with a scratch file."""
    from swarm.models.flash.drive_measurement import measure_folder
    from swarm.models.flash.files.block_files import flash_root

    folder = nearest_folder(flash_root(None))
    try:
        speed = measure_folder(folder)
    except DriveFailed as error:
        return verdicts.failure("Drive", str(error), "set HF_HOME to a folder on another drive")
    except (OSError, NotEnoughSpace) as error:
        return verdicts.unknown("Drive", f"not measured: {error}")
    return verdicts.drive(str(folder), speed.direct, speed.small, speed.large)
