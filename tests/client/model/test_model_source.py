from __future__ import annotations

import pytest

from swarm.client.config import NetworkOptions
from swarm.client.model import model_source
from swarm.client.model.auto_model import ModelSource
from swarm.errors import HubUnreachable, InvalidOption, WeightsUnavailable
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER


def source(model="org/model", weights_from="auto", **network) -> ModelSource:
    return ModelSource(model, None, None, weights_from, (), None, NetworkOptions(**network))


@pytest.fixture
def no_hub(monkeypatch):
    def unreachable(*arguments, **options):
        raise HubUnreachable("the hub does not answer")

    monkeypatch.setattr(model_source, "open_checkpoint", unreachable)


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


@pytest.mark.parametrize("network", [{}, {"weights_from": "hub", "trust_on_first_use": True}])
def test_where_nothing_is_believed_or_the_hub_is_asked_for_no_peer_is_asked(no_hub, peers, network):
    with pytest.raises(HubUnreachable, match=r"^the hub does not answer$"):
        source(**network).open()
    assert not peers


@pytest.mark.parametrize("network", [{"trust_on_first_use": True}, {"digests": DEMO_FOLDER / "digests.json"}])
def test_what_peers_say_is_told_with_what_the_hub_said(no_hub, peers, network):
    with pytest.raises(HubUnreachable, match=r"the hub does not answer\. Nor can it be had from peers: no peer shares"):
        source(**network).open()
    assert peers == [("org/model", None)]
