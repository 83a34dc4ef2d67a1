from __future__ import annotations

import shlex
import statistics

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Mobility, ModelInfo, ServerState
from swarm.monitor.swarm_poller import PollResult, build_swarm_view
from swarm.monitor.swarm_view import (
    MAX_TEXT_LENGTH,
    AnnouncedModel,
    SwarmView,
    build_model_view,
    serve_command,
    shorten,
)
from swarm.routing.suspicion import Opinion
from tests.infos import server_info
from tests.monitor.sources import found

BLOCKS = 9


@st.composite
def swarms(draw):
    servers = []
    for number in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, BLOCKS - 1))
        end = draw(st.integers(start + 1, BLOCKS))
        state = draw(st.sampled_from(ServerState))
        digest = draw(st.sampled_from(["0123456789ab"] * 4 + ["ffffffffffff"]))
        servers.append(
            server_info(
                start,
                end,
                f"peer{number}",
                state=state,
                digests=(digest,) * (end - start) if state is ServerState.ONLINE else (),
                throughput=draw(st.floats(0.1, 1000)),
                revision=draw(st.sampled_from(["main"] * 5 + ["old"])),
                name=draw(st.text(max_size=100)),
            )
        )
    return found(BLOCKS, *servers)


@given(swarms())
def test_what_is_said_of_blocks_follows_from_what_servers_announce(swarm):
    view = build_model_view(swarm, {})
    excluded = {server.peer_id for server in view.servers if server.excluded}
    online = [s for s in swarm.servers if s.state is ServerState.ONLINE and s.peer_id not in excluded]
    assert all(s.peer_id in excluded for s in swarm.servers if s.state is ServerState.ONLINE and s.revision != "main")
    assert view.servers_online == len(online)
    assert view.servers_total == len(view.servers) == len(swarm.servers)
    for block, seen in enumerate(view.coverage):
        holders = [s for s in online if block in s.span]
        assert seen.servers == len(holders)
        assert seen.joining == sum(block in s.span for s in swarm.servers if s.state is ServerState.JOINING)
        assert (seen.throughput > 0) == bool(holders)
        assert seen.throughput <= sum(s.tokens_per_second for s in holders) * 1.0001
    gaps = [block for block, seen in enumerate(view.coverage) if not seen.servers]
    assert [block for gap in view.missing for block in range(gap.start, gap.end)] == gaps
    assert all(one.end < other.start for one, other in zip(view.missing, view.missing[1:], strict=False))
    assert view.complete == (not gaps)
    served = [seen.throughput for seen in view.coverage if seen.servers]
    assert view.throughput == (min(served) if not gaps else 0)
    assert view.median == (statistics.median(served) if served else 0)
    if view.weakest is not None:
        assert view.coverage[view.weakest].throughput == min(served)


@given(swarms(), st.dictionaries(st.sampled_from(["peer0", "peer1"]), st.floats(0, 10)))
def test_the_json_says_all_of_it(swarm, trips):
    view = build_swarm_view(PollResult((swarm,), ("absent",), 3), trips, (), 1e9, 10.0)
    again = msgspec.json.decode(msgspec.json.encode(view), type=SwarmView, strict=True)
    assert again == view
    assert all(s.round_trip == trips.get(s.peer_id) for s in view.models[0].servers)


def test_every_fact_of_a_server_is_shown():
    info = server_info(
        2, 6, "QmAbcdef", name="Ann's laptop", throughput=40.0, forward_throughput=300.0, network_throughput=8.0,
        queue_delay=0.25, cache_tokens_free=77, compute_dtype="bfloat16", quantization="int4", version="2.1",
        relayed=True, adapters=("org/pirate",), mobility=Mobility.COOLING, sparse=True, perplexity_loss=0.004,
        exit_blocks=(4, 6), exit_confidences=("similarity",),
    )  # fmt: skip
    (server,) = build_model_view(found(8, info), {"QmAbcdef": 0.05}).servers
    assert (server.peer_id, server.short_id, server.name) == ("QmAbcdef", "…Abcdef", "Ann's laptop")
    assert (server.start, server.end, server.state, server.excluded) == (2, 6, "online", "")
    assert (server.dtype, server.quantization, server.version, server.revision) == ("bfloat16", "int4", "2.1", "main")
    # The link carries less than the 10 tokens/s that it computes of its four blocks.
    assert (server.throughput, server.compute, server.forward, server.network) == (8.0, 40.0, 300.0, 8.0)
    assert (server.queue, server.cache_tokens_free, server.relayed, server.round_trip) == (0.25, 77, True, 0.05)
    assert (server.adapters, server.mobility) == (("org/pirate",), "cooling")
    assert (server.sparse, server.perplexity_loss, server.exit_blocks) == (True, 0.004, (4, 6))


def test_what_audits_say_of_servers_is_shown():
    good, liar, other = (server_info(0, 4, name) for name in ("good", "liar", "other"))
    opinions = {"good": Opinion(-3.0, 0.0, 7, 0), "liar": Opinion(10.0, 0.0, 2, 1), "gone": Opinion()}
    seen = {one.peer_id: one.audits for one in build_model_view(found(4, good, liar, other), {}, (), opinions).servers}
    assert seen["other"] is None
    assert (seen["good"].agreed, seen["good"].differed, seen["good"].quarantined) == (7, 0, False)
    assert (seen["liar"].agreed, seen["liar"].differed, seen["liar"].quarantined) == (2, 1, True)
    assert seen["good"].suspicion < 0.1 < 0.9 < seen["liar"].suspicion


def test_a_liar_does_not_make_a_block_look_quick():
    honest = [server_info(0, 4, f"peer{n}", throughput=40.0) for n in range(5)]
    liar = server_info(2, 4, "liar", throughput=1e9)
    view = build_model_view(found(4, *honest, liar), {})
    assert view.coverage[2].throughput < 10 * view.coverage[0].throughput


def test_what_others_do_not_use_is_shown_and_does_not_count_and_disputed_weights_are_marked():
    odd = server_info(0, 2, "odd", digests=("ffffffffffff",) * 2)
    servers = [server_info(0, 2, "one"), server_info(0, 2, "two"), odd, server_info(2, 4, "old", revision="older")]
    view = build_model_view(found(4, *servers), {})
    reasons = {server.peer_id: server.excluded for server in view.servers if server.excluded}
    assert set(reasons) == {"old"}
    assert reasons["old"] == "it serves revision older, most serve main"
    assert [block.servers for block in view.coverage] == [3, 3, 0, 0]
    disputed = {server.peer_id: server.disputed for server in view.servers if server.disputed}
    assert set(disputed) == {"one", "two", "odd"}
    assert "weights of block 0 differ from those of others" in disputed["odd"]


def test_commands_are_safe_to_copy():
    for model, expected in [
        ("org/model-7b", "swarm server org/model-7b --blocks 1:3 --initial-peers /a /b"),
        ("swarm-demo", "swarm server --blocks 1:3 --initial-peers /a /b"),
        ("my_folder.v2", "swarm server path/to/my_folder.v2 --blocks 1:3 --initial-peers /a /b"),
        ("x; rm -rf ~", None),
        ("org/model\n", None),
        ("--identity-path", None),
        ("-x/model", None),
        ("../../model", None),
        ("$(id)/model", None),
        ("a/b/c", None),
        ("modèle", None),
        ("", None),
    ]:
        assert serve_command(model, 1, 3, ["/a", "/b"]) == expected


@given(st.text(max_size=20))
def test_no_name_of_a_model_becomes_more_than_one_word(name):
    found_command = serve_command(name, 1, 3)
    assert found_command is None or name == "swarm-demo" or len(shlex.split(found_command)) == 7


@given(st.text(max_size=200))
def test_texts_of_peers_are_printable_and_short(text):
    shown = shorten(text)
    assert shown.isprintable()
    assert len(shown) <= MAX_TEXT_LENGTH
    if text.isprintable() and len(text) <= MAX_TEXT_LENGTH:
        assert shown == text


def test_what_would_deceive_on_a_terminal():
    assert shorten("a\x1b[2Jb\u202ec\nd") == "a�[2Jb�c�d"
    info = server_info(
        0,
        1,
        "peer",
        name="\x1b]0;x\x07",
        version="\r1",
        compute_dtype="\x00",
        quantization="\t",
        adapters=("\x1b[31m",),
    )
    view = build_model_view(found(1, info, name="mo\x1b[2Jdel"), {})
    (server,) = view.servers
    texts = (view.name, server.name, server.version, server.dtype, server.quantization, *server.adapters)
    assert all(text.isprintable() for text in texts)


def test_a_swarm_is_complete_if_all_of_its_models_are():
    whole, gap = found(2, server_info(0, 2)), found(2, server_info(0, 1), name="org/other")
    nobody = AnnouncedModel(ModelInfo("org/nobody", 5, "main"), ())

    def view(*models, absent=()):
        return build_swarm_view(PollResult(models, absent), {}, (), 0.0, 10.0)

    assert view(whole).complete
    assert not view().complete
    assert not view(whole, gap).complete
    assert not view(whole, absent=("org/absent",)).complete
    # Whom somebody serves comes first; anybody can name models.
    assert [model.name for model in view(nobody, gap, whole).models] == ["org/other", "org/model", "org/nobody"]
    assert view(nobody).models[0].missing[0].end == 5
