from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from swarm.data_structures import Span
from swarm.errors import HubUnreachable, InvalidOption, ModelNotFound
from swarm.protocol import messages
from swarm.server import weight_source
from swarm.server.__main__ import _server_config
from swarm.server.__main__ import main as command
from swarm.server.config import BlocksOption, ServerConfig, WeightsOption
from swarm.server.weight_source import WeightSharing, WeightSource
from swarm.transport.p2p import P2PConfig
from tests.memory_hub import stream_pair
from tests.shared_weights.peers import BLOCKS, NAME, make_checkpoint

SOMEWHERE = "/ip4/127.0.0.1/tcp/9/p2p/QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model")


class Thread:
    async def run(self, job, *arguments):
        return job(*arguments)


async def join():
    raise AssertionError("no network is needed for that")


def config(weights: WeightsOption, model: str | None = NAME, peers: tuple[str, ...] = ()) -> ServerConfig:
    return ServerConfig(
        model=model,
        blocks=BlocksOption.parse("1"),
        p2p=P2PConfig(initial_peers=peers),
        throughput=1.0,
        weights=weights,
    )


def opened(*arguments, **options) -> WeightSource:
    return asyncio.run(WeightSource.open(config(*arguments, **options), Thread(), join))


def test_weights_are_shared_in_private_swarms_unless_it_is_said():
    for share, is_private, expected in [
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (False, True, False),
    ]:
        assert WeightsOption(share=share).shares(is_private) is expected


def test_a_folder_has_the_name_of_the_model_that_was_asked_for(checkpoint):
    source = opened(WeightsOption(checkpoint.source))
    assert (source.checkpoint.name, source.from_peers) == (NAME, None)
    asyncio.run(source.require(Span(0, 1)))


def test_the_folder_of_a_model_needs_no_source(checkpoint):
    assert opened(WeightsOption(), checkpoint.source).checkpoint.source == checkpoint.source
    with pytest.raises(ModelNotFound):
        opened(WeightsOption("/nowhere/at/all"))


def test_what_peers_say_is_told_with_what_the_hub_said(monkeypatch):
    monkeypatch.setattr(weight_source, "open_checkpoint", unreachable)

    async def joined():
        return None

    options = config(WeightsOption("auto"), peers=(SOMEWHERE,))
    with pytest.raises(HubUnreachable, match=r"the hub does not answer\. Nor can it be had from peers: nothing says"):
        asyncio.run(WeightSource.open(options, Thread(), joined))


def test_command_line_options():
    for arguments, expected in [
        ((), WeightsOption()),
        (("--weights-from", "peers", "--digests", "FILE"), WeightsOption("peers", Path("FILE"))),
        (("--digests", "a.json", "--share-weights", "off"), WeightsOption(digests=Path("a.json"), share=False)),
        (("--share-weights", "on", "--share-rate", "10MB"), WeightsOption(share=True, share_rate=10_000_000)),
        (("--weights-from", "./peers"), WeightsOption("./peers")),
    ]:
        context = command.make_context("server", [NAME, "--new-swarm", *arguments])
        assert _server_config(context.params, ()).weights == expected


@pytest.mark.parametrize("rate", ["fast", "-1", "0"])
def test_rates_that_are_none(rate):
    """With 0, the first chunk was divided by it."""
    context = command.make_context("server", [NAME, "--new-swarm", "--share-rate", rate])
    with pytest.raises(InvalidOption, match="--share-rate"):
        _server_config(context.params, ())


def unreachable(*arguments, **options):
    raise HubUnreachable("the hub does not answer")


async def asked(sharing: WeightSharing) -> messages.WeightsMessage:
    """What is answered when its parts are asked for."""
    ours, theirs = stream_pair("peer", "server")
    serving = asyncio.create_task(sharing.serve(theirs))
    await ours.send(messages.FindParts(NAME, ""))
    answer = messages.decode_weights((await ours.receive(0)).header)
    ours.close()
    await asyncio.gather(serving, return_exceptions=True)
    return answer


def test_a_server_that_does_not_share_says_so(checkpoint):
    async def scenario() -> None:
        sharing = WeightSharing(config(WeightsOption()), checkpoint, lambda: False)
        assert not sharing.is_on
        sharing.look_again()
        assert (await asked(sharing)).code == "weights_not_shared"
        await sharing.close()

    asyncio.run(scenario())


def test_a_server_that_shares_has_digests_soon_and_can_be_closed_while_it_looks(checkpoint):
    async def scenario() -> None:
        sharing = WeightSharing(config(WeightsOption(share=True)), checkpoint, lambda: False)
        assert sharing.is_on
        assert (await asked(sharing)).code == "weights_not_ready"
        sharing.look_again()
        sharing.look_again()
        deadline = time.monotonic() + 60
        while isinstance(answer := await asked(sharing), messages.Refusal):
            assert answer.code == "weights_not_ready"
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert set(answer.digests) == {"files", "client", *map(str, range(BLOCKS))}
        sharing.look_again()
        await sharing.close()

    asyncio.run(scenario())
