from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import ServerInfo, ServerState, Span
from swarm.routing.compatibility import compatible_servers


def server(
    peer_id: str,
    start: int,
    digests: str,
    revision: str = "main",
    state: ServerState = ServerState.ONLINE,
    quantization: str = "none",
) -> ServerInfo:
    """A server of as many blocks as there are letters in `digests`."""
    return ServerInfo(
        peer_id=peer_id,
        span=Span(start, start + len(digests)),
        state=state,
        throughput=1.0,
        cache_tokens_free=0,
        revision=revision,
        digests=tuple(digests),
        compute_dtype="float32",
        quantization=quantization,
        version="1",
    )


def usable(servers, digests=None, revision="main") -> list[str]:
    return [one.peer_id for one in compatible_servers(servers, revision, digests).servers]


def test_servers_of_the_same_weights_are_usable_together():
    servers = [server("a", 0, "xy"), server("b", 1, "yz"), server("c", 2, "z")]
    found = compatible_servers(servers, "main")
    assert found.servers == tuple(servers)
    assert found.excluded == {}


def test_another_revision():
    found = compatible_servers([server("a", 0, "x"), server("b", 0, "x", revision="old")], "main")
    assert [one.peer_id for one in found.servers] == ["a"]
    assert "revision old" in found.excluded["b"]
    assert "main" in found.excluded["b"]


def test_only_servers_of_a_precision():
    servers = [server("a", 0, "x"), server("b", 0, "x", quantization="int8"), server("c", 0, "x", quantization="nf4")]
    assert len(compatible_servers(servers, "main").servers) == 3
    found = compatible_servers(servers, "main", quant={"none", "int8"})
    assert [one.peer_id for one in found.servers] == ["a", "b"]
    assert found.excluded == {"c": "its weights are nf4, this client accepts int8 or none"}
    found = compatible_servers(servers, "main", quant={"nf4"})
    assert found.excluded["a"] == "its weights are not quantized, this client accepts nf4"


def test_servers_that_select_neurons_are_refused_if_results_have_to_be_exact():
    servers = [server("a", 0, "x"), replace(server("b", 0, "x"), sparse=True, perplexity_loss=0.001)]
    assert len(compatible_servers(servers, "main").servers) == 2
    found = compatible_servers(servers, "main", exact=True)
    assert [one.peer_id for one in found.servers] == ["a"]
    assert "NetworkOptions(exact=False) accepts that" in found.excluded["b"]


def test_servers_of_an_unwanted_precision_still_say_which_weights_are_right():
    servers = [server("a", 0, "q"), *(server(name, 0, "x", quantization="int8") for name in "bc")]
    assert compatible_servers(servers, "main", quant={"none"}).servers == ()


def test_only_online_servers_count_and_the_others_are_not_accused():
    servers = [server("a", 0, "x", state=ServerState.JOINING), server("b", 0, "x", state=ServerState.OFFLINE)]
    found = compatible_servers(servers, "main")
    assert found.servers == ()
    assert found.excluded == {}


def test_the_majority_decides_for_a_client_without_weights():
    servers = [server("a", 0, "xy"), server("odd", 0, "xq"), server("b", 1, "y")]
    found = compatible_servers(servers, "main")
    assert [one.peer_id for one in found.servers] == ["a", "b"]
    assert "block 1" in found.excluded["odd"]


def test_a_server_that_is_odd_in_one_block_is_not_used_for_the_others():
    servers = [server("a", 0, "xyz"), server("b", 0, "xyz"), server("odd", 0, "xyq")]
    assert usable(servers) == ["a", "b"]


def test_other_revisions_and_absent_servers_have_no_vote():
    servers = [
        server("a", 0, "x"),
        *(server(f"old{n}", 0, "q", revision="old") for n in range(3)),
        *(server(f"gone{n}", 0, "q", state=ServerState.OFFLINE) for n in range(3)),
    ]
    assert usable(servers) == ["a"]


def test_a_client_that_knows_the_weights_believes_nobody_else():
    servers = [server("a", 1, "y"), *(server(f"odd{n}", 1, "q") for n in range(5))]
    assert usable(servers, digests=["x", "y", "z"]) == ["a"]
    assert usable(servers, digests=["x", "n", "z"]) == []


def test_a_draw_is_decided_alike_by_everybody():
    servers = [server("a", 0, "x"), server("b", 0, "w")]
    assert usable(servers) == usable(servers[::-1]) == ["b"]


@given(st.lists(st.tuples(st.integers(0, 3), st.text("xyz", min_size=1, max_size=3)), max_size=8))
@settings(deadline=None)
def test_what_is_usable_never_disagrees_and_nobody_is_forgotten(specs):
    servers = [server(f"p{n}", start, digests) for n, (start, digests) in enumerate(specs)]
    found = compatible_servers(servers, "main")
    seen: dict[int, str] = {}
    for one in found.servers:
        for block, digest in enumerate(one.digests, one.span.start):
            assert seen.setdefault(block, digest) == digest
    assert sorted([*(one.peer_id for one in found.servers), *found.excluded]) == sorted(s.peer_id for s in servers)
    assert compatible_servers(servers[::-1], "main").excluded.keys() == found.excluded.keys()
