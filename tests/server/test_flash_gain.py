"""`--flash auto` with `--blocks auto`: more blocks on flash, if the swarm gains by them."""

from __future__ import annotations

import math

import pytest
import torch
import uvloop

from swarm.data_structures import Span
from swarm.errors import DriveFailed, NotEnoughSpace
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.flash.costs import compute_speed
from swarm.models.flash.costs.cost_model import ComputeSpeed, MachineSpeed
from swarm.models.flash.costs.flash_choice import FlashChoice
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.drive_space import SPARE_BYTES
from swarm.models.flash.files.planned_blocks import PlannedBlock
from swarm.models.flash.flash_footprint import FlashFootprint
from swarm.models.flash.plans.block_plan import BlockPlan, RecordKind
from swarm.models.flash.reading.drive_speed import DriveSpeed
from swarm.models.flash.records.record_layout import RecordLayout
from swarm.server import flash_gain, memory_budget
from swarm.server.config import BlocksOption, ServerConfig
from swarm.server.flash_budget import FlashBudget, FlashOption
from swarm.server.flash_gain import compare
from swarm.server.lifecycle import Server
from swarm.server.resolved_config import ResolvedConfig, resolve_config
from swarm.server.throughput.throughput_option import ThroughputOption
from swarm.transport.p2p import P2PConfig
from tests import zoo
from tests.models.flash.files.preparations import set_free_space

PRODUCTS = ComputeSpeed(((1, 1e-9),))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family to a checkpoint's folder, made once."""
    made = {}

    def folder(family: str):
        if family not in made:
            made[family] = zoo.make_checkpoint(family, tmp_path_factory.mktemp("checkpoint") / family)
        return made[family]

    return folder


class Machine:
    """A machine whose drive takes so many seconds for a read. Counts how often it is measured."""

    def __init__(self, read_s: float = 1e-6) -> None:
        self.read_s = read_s
        self.error: Exception | None = None
        self.measured = 0

    def measure_folder(self, folder, io) -> DriveSpeed:
        self.measured += 1
        assert folder.is_dir()
        if self.error is not None:
            raise self.error
        return DriveSpeed("direct", (1, 64), (4096, 1 << 20), ((self.read_s, 64 * self.read_s),) * 2)

    def machine_speed(self, drive, plan, layout, hidden) -> MachineSpeed:
        return MachineSpeed(drive, PRODUCTS, PRODUCTS)


@pytest.fixture
def machine(monkeypatch) -> Machine:
    one = Machine()
    monkeypatch.setattr(flash_gain, "measure_folder", one.measure_folder)
    monkeypatch.setattr(flash_gain, "machine_speed", one.machine_speed)
    return one


@pytest.fixture
def resolve(folders, machine, monkeypatch, tmp_path):
    """Resolves options where memory holds a share of the blocks."""

    def resolved(family: str = "mixtral", share: float = 0.5, blocks: str = "auto", **options) -> ResolvedConfig:
        weights = 4 * sum(open_checkpoint(folders(family)).structure.block_parameters)
        free = math.ceil(share * weights / memory_budget.MAX_MEMORY_SHARE) + 10_000
        monkeypatch.setattr(memory_budget, "free_memory", lambda device: free)
        config = ServerConfig(
            model=str(folders(family)),
            blocks=BlocksOption.parse(blocks),
            device="cpu",
            cache_tokens=1,
            adapter_memory=0,
            cache_dir=tmp_path / "cache",
            **{"quant": "none", **options},
        )
        return resolve_config(config)

    return resolved


@pytest.fixture(autouse=True)
def _all_logged(caplog) -> None:
    caplog.set_level("INFO", "swarm.server.resolved_config")


def test_a_fast_drive_holds_more_experts_than_memory(resolve, machine, caplog):
    config = resolve()
    assert machine.measured == 1
    assert config.flash.exact
    assert config.flash.blocks_that_fit() > 3
    assert "Weights: on flash, because a token takes" in caplog.text
    assert "ms in the memory of 2 servers like this one" in caplog.text


@pytest.mark.parametrize(("read_s", "form"), [(1e-6, "none"), (1.0, "int8")])
def test_weights_that_would_have_been_quantized_are_exact_on_flash(resolve, machine, read_s, form):
    """Of an expert, 8 bits make nothing smaller; of attention, enough for one more block here."""
    machine.read_s = read_s
    config = resolve("mixtral", share=0.45, quant="auto")
    assert config.quantization == form
    assert (config.flash is not None) == (form == "none")
    assert machine.measured == 1


def test_a_slow_drive_leaves_them_to_others(resolve, machine, caplog):
    machine.read_s = 1.0
    assert resolve().flash is None
    assert machine.measured == 1
    assert "Weights: in memory, because a token takes" in caplog.text


def test_dense_blocks_are_not_even_measured(resolve, machine, caplog):
    assert resolve("llama").flash is None
    assert resolve("opt").flash is None
    assert machine.measured == 0
    assert "because a token" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"share": 2.0},
        {"blocks": "2"},
        {"blocks": "0:2"},
        {"quant": "int8"},
        {"quant": "int8", "share": 0.3, "blocks": "4"},
        {"flash": FlashOption(off=True)},
    ],
    ids=str,
)
def test_nothing_is_measured_where_there_is_no_question(resolve, machine, options):
    assert resolve(**options).flash is None
    assert machine.measured == 0


def test_blocks_that_do_not_fit_at_all_go_to_flash_unmeasured(resolve, machine, caplog):
    config = resolve(share=0.12)
    assert config.flash is not None
    assert machine.measured == 0
    assert "on flash, because the blocks do not fit in memory" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        NotEnoughSpace("the drive is full"),
        DriveFailed("it does not answer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_drive_that_cannot_be_measured_is_not_used(resolve, machine, caplog, error):
    machine.error = error
    assert resolve().flash is None
    assert "Weights: in memory, because the speed of the drive of" in caplog.text
    assert str(error) in caplog.text


def test_a_drive_without_space_is_not_measured(resolve, machine, monkeypatch, caplog):
    set_free_space(monkeypatch, SPARE_BYTES)
    assert resolve().flash is None
    assert machine.measured == 0
    assert "has room for 0 on flash" in caplog.text


def test_dense_blocks_among_the_mixtures_count(resolve, machine):
    """qwen2_moe, of which four blocks are dense here, and most of them streamed."""
    machine.read_s = 0.05
    assert resolve("qwen2_moe").flash is None
    machine.read_s = 1e-7
    config = resolve("qwen2_moe")
    spans = config.flash.windows(config.flash.blocks_that_fit())
    assert spans == [Span(0, 4), Span(1, 5), Span(2, 6)]
    for span in spans:
        config.flash.check_fits(span)


def test_the_worst_window_decides(tmp_path):
    """A server does not know yet whether its blocks will be dense, and streamed, or mixtures."""
    machine = MachineSpeed(DriveSpeed("direct", (1,), (4096,), ((2e-3,),)), PRODUCTS, PRODUCTS)
    packed = PackedModel(tmp_path, "model", "0", torch.float32, "model")
    dense = planned_block(RecordKind.BLOCK, records=1, values=100_000)
    mixture = planned_block(RecordKind.EXPERTS, records=16, values=10_000)

    def choice(*blocks: PlannedBlock) -> FlashChoice:
        budget = FlashBudget(FlashFootprint(blocks, 1), 2 * 10**6, 1, 900_000, packed, exact=True)
        assert budget.windows(3)
        return compare(budget, wanted=3, fitting=2, machine=machine)

    assert choice(*[mixture] * 3).flash
    assert choice(*[mixture] * 5).flash
    assert not choice(*[dense] * 3, *[mixture] * 3).flash
    assert not choice(*[mixture] * 3, *[dense] * 3).flash


def planned_block(kind: RecordKind, records: int, values: int) -> PlannedBlock:
    layout = RecordLayout.of({"w": (records, values)}, {"w": 0}, torch.float32)
    return PlannedBlock(BlockPlan(kind, {}, {}), layout, {}, 1000, 2 if kind is RecordKind.EXPERTS else 0)


def test_a_server_serves_more_experts_than_its_memory_holds(folders, machine, monkeypatch, tmp_path):
    weights = 4 * sum(open_checkpoint(folders("mixtral")).structure.block_parameters)
    monkeypatch.setattr(memory_budget, "free_memory", lambda device: weights * 2 // 3)
    config = ServerConfig(
        model=str(folders("mixtral")),
        p2p=P2PConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",)),
        device="cpu",
        dtype="float32",
        quant="none",
        cache_tokens=64,
        adapter_memory=0,
        cache_dir=tmp_path,
        throughput=ThroughputOption(100.0),
    )

    async def scenario() -> None:
        server = Server(config)
        await server.start()
        service = server._service
        try:
            assert service.model.flash.pools
            assert service.span.length > 3
            assert service.model.weight_bytes < weights * 2 // 3
            assert not service.sparse
        finally:
            await server.stop()

    uvloop.run(scenario())
    assert machine.measured == 1


def test_the_machine_is_really_measured(folders, monkeypatch, tmp_path, caplog):
    """No stubs: a second or two."""
    monkeypatch.setattr(compute_speed, "WEIGHT_BYTES", 1 << 18)
    weights = 4 * sum(open_checkpoint(folders("mixtral")).structure.block_parameters)
    monkeypatch.setattr(memory_budget, "free_memory", lambda device: weights)
    config = ServerConfig(
        model=str(folders("mixtral")), device="cpu", quant="none", cache_tokens=1, adapter_memory=0, cache_dir=tmp_path
    )
    resolve_config(config)
    assert "ms in the memory of 2 servers like this one" in caplog.text
    assert not list(tmp_path.iterdir())
