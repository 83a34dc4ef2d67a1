"""What a client loads, and what it is told when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm import AutoDistributedModelForCausalLM
from swarm.client.config import NetworkOptions
from swarm.client.model import auto_model
from swarm.client.model.auto_model import ModelSource
from swarm.errors import (
    CheckpointError,
    HubUnreachable,
    InvalidOption,
    MissingBlocks,
    ModelNotFound,
    PeerUnreachable,
    UnknownWeights,
    UnsupportedModel,
    WeightsUnavailable,
)
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.swarms import run_client, run_swarm, write_digests
from tests.zoo import PROMPTS, make_checkpoint

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"


def load(model: Path | str, **options: object) -> object:
    return AutoDistributedModelForCausalLM.from_pretrained(model, **{"initial_peers": [NOBODY], **options})


def test_it_loads_embeddings_norm_and_head_only(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    own = {file for name, file in index.items() if ".layers." not in name}
    digests = write_digests(folder, tmp_path / "digests.json")
    with run_swarm(folder, ("0:6",)) as swarm:
        for file in set(index.values()) - own:
            (folder / file).unlink()  # shards that hold nothing but blocks
        with pytest.raises(UnknownWeights, match="--digests FILE"):
            swarm.client()
        with run_client(swarm, digests=digests) as model:
            names = {name for name, _ in model.named_parameters()}
            assert {name for name in index if ".layers." not in name} >= names
            assert not any(".layers." in name for name in names)
            written = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=3, do_sample=False)
            assert written.shape == (1, len(PROMPTS[0]) + 3)


def test_a_family_that_cannot_work_is_named_before_weights_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UnsupportedModel, match="t5"):
        load(tmp_path)


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path)
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    with pytest.raises(ModelNotFound, match="not a local folder"):
        load("nobody/has-this-model")
    with pytest.raises(ModelNotFound, match="neither a local folder"):
        load(str(tmp_path / "not" / "there" / "at all"))
    with pytest.raises(PeerUnreachable, match="none of the initial peers"):
        load(folder)
    with pytest.raises(InvalidOption, match="SWARM_INITIAL_PEERS"):
        load(folder, initial_peers=None)
    with pytest.raises(InvalidOption, match="multiaddress"):
        load(folder, initial_peers=["localhost:31337"])
    with pytest.raises(InvalidOption, match="/p2p/"):
        load(folder, initial_peers=["/ip4/127.0.0.1/tcp/31337"])
    with pytest.raises(InvalidOption, match="int3"):
        load(folder, dtype="int3")
    with pytest.raises(InvalidOption, match="'zip' is not one of auto, none, float16, bfloat16, blockwise8"):
        load(folder, wire="zip")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        load(folder)


def test_missing_blocks_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    with run_swarm(folder, ("0:2", "5:6")) as swarm, run_client(swarm, wait_for_blocks=1.0) as model:
        with pytest.raises(MissingBlocks, match="blocks 2:5 are missing") as caught:
            model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=3)
        assert caught.value.blocks == (2, 3, 4)
        swarm.start("2:5").wait_ready()
        # The client looks again by itself.
        assert model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=3).shape[1] == len(PROMPTS[0]) + 3


@pytest.mark.slow
def test_servers_of_other_weights_are_not_chained(tmp_path: Path) -> None:
    """A fine-tune under the same name, with the same config: nothing but the weights differs."""
    folder = make_checkpoint("llama", tmp_path / "one" / "model")
    other = make_checkpoint("llama", tmp_path / "two" / "model")
    _change_one_weight(other, block=4)
    with run_swarm(folder, ("0:3", "3:6")) as swarm, run_client(swarm, wait_for_blocks=1.0) as model:
        expected = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=3, do_sample=False)
        swarm.servers[1].stop()
        del swarm.servers[1]
        swarm.model = str(other)
        swarm.start("3:6").wait_ready()
        with pytest.raises(MissingBlocks, match="weights of block 4"):
            model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=3)
        swarm.model = str(folder)
        swarm.start("3:6").wait_ready()
        written = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=3, do_sample=False)
        assert written.tolist() == expected.tolist()


def _change_one_weight(folder: Path, block: int) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.{block}.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_long_answer_survives_the_loss_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint("llama", tmp_path)
    prompt = torch.tensor([PROMPTS[0]])
    spans = ("0:3", "3:6", "2:6")
    with run_swarm(folder, spans) as swarm, run_client(swarm, show_route=True) as model:
        options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(prompt, **options).tolist()
        with model.inference_session(max_length=32) as session:
            used = {hop.server.peer_id for hop in session.open().hops}
            step = session.compute
            calls = 0

            def compute(*args: Any) -> torch.Tensor:
                nonlocal calls
                calls += 1
                if calls == 6:
                    next(server for server in swarm.servers[1:] if server.peer_id in used).kill()
                return step(*args)

            session.compute = compute
            assert model.generate(prompt, **options).tolist() == expected
            assert {hop.server.peer_id for hop in session.route.hops} != used
        swarm.servers[:] = [server for server in swarm.servers if server.process.is_alive()]
        assert capsys.readouterr().out.count("route: 0:") == 3


def source(model="org/model", weights_from="auto", **network) -> ModelSource:
    return ModelSource(model, None, None, weights_from, (), None, NetworkOptions(**network))


@pytest.fixture
def no_hub(monkeypatch):
    def unreachable(*arguments, **options):
        raise HubUnreachable("the hub does not answer")

    monkeypatch.setattr(auto_model, "open_checkpoint", unreachable)


@pytest.fixture
def peers(monkeypatch):
    """Names and local blocks of models that were asked for; no peer shares them."""
    asked = []

    async def receive(self, model, local_blocks):
        asked.append((model, local_blocks))
        raise WeightsUnavailable("no peer shares it")

    monkeypatch.setattr(ModelSource, "_receive", receive)
    return asked


def test_a_folder_is_opened_where_it_is(peers):
    for weights_from in ("auto", "hub"):
        assert source(DEMO_FOLDER, weights_from).open().source == str(DEMO_FOLDER)
    assert not peers


@pytest.mark.parametrize("weights_from", ["", "Peers", "folder"])
def test_another_source_is_refused(weights_from):
    with pytest.raises(InvalidOption, match="auto, hub, peers"):
        source(weights_from=weights_from)


def test_peers_need_a_name():
    with pytest.raises(InvalidOption, match="needs the name"):
        source(None, "peers").open()


def test_peers_are_asked_at_once_if_they_are_the_source(peers):
    with pytest.raises(WeightsUnavailable):
        source(weights_from="peers").open(4)
    assert peers == [("org/model", 4)]


@pytest.mark.parametrize("network", [{}, {"weights_from": "hub", "digests": DEMO_FOLDER / "digests.json"}])
def test_where_nothing_is_believed_or_the_hub_is_asked_for_no_peer_is_asked(no_hub, peers, network):
    with pytest.raises(HubUnreachable, match=r"^the hub does not answer$"):
        source(**network).open()
    assert not peers


def test_what_peers_say_is_told_with_what_the_hub_said(no_hub, peers):
    with pytest.raises(HubUnreachable, match=r"the hub does not answer\. Nor can it be had from peers: no peer shares"):
        source(digests=DEMO_FOLDER / "digests.json").open()
    assert peers == [("org/model", None)]
