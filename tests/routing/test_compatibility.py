from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import ServerInfo, ServerState, Span, WeightDigests
from swarm.routing.compatibility import compatible_servers, disputed_blocks


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
    known = WeightDigests(dict(enumerate(digests)), "those of the test") if digests is not None else None
    return [one.peer_id for one in compatible_servers(servers, revision, known).servers]


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


def test_only_online_servers_count_and_the_others_are_not_accused():
    servers = [server("a", 0, "x", state=ServerState.JOINING), server("b", 0, "x", state=ServerState.OFFLINE)]
    found = compatible_servers(servers, "main")
    assert found.servers == ()
    assert found.excluded == {}


def test_without_known_digests_servers_are_not_excluded_but_disputes_are_found():
    servers = [server("a", 0, "xy"), server("odd", 0, "xq"), server("b", 1, "y"), server("c", 2, "z")]
    assert usable(servers) == ["a", "odd", "b", "c"]
    assert disputed_blocks(servers) == {"a": 1, "odd": 1, "b": 1}


def test_other_revisions_and_absent_servers_dispute_nothing():
    servers = [
        server("a", 0, "x"),
        server("old", 0, "q", revision="old"),
        server("gone", 0, "q", state=ServerState.OFFLINE),
    ]
    assert disputed_blocks(servers) == {}


def test_known_digests_decide_whatever_servers_announce():
    servers = [server("a", 1, "y"), *(server(f"odd{n}", 1, "q") for n in range(5))]
    assert usable(servers, digests=["x", "y", "z"]) == ["a"]
    assert usable(servers, digests=["x", "n", "z"]) == []


def test_of_a_block_whose_digest_is_not_known_the_revision_counts():
    servers = [server("a", 0, "xy"), server("b", 0, "xy", revision="old")]
    assert compatible_servers(servers, "main", WeightDigests({0: "x"}, "those of the test")).servers == (servers[0],)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text("xyz", min_size=1, max_size=3)), max_size=8),
    st.dictionaries(st.integers(0, 5), st.sampled_from("xyz")),
)
@settings(deadline=None)
def test_usable_servers_have_the_right_weights_and_all_others_are_excluded(specs, by_block):
    servers = [server(f"p{n}", start, digests) for n, (start, digests) in enumerate(specs)]
    known = WeightDigests(by_block, "those of the test")
    found = compatible_servers(servers, "main", known)
    for one in found.servers:
        for block, digest in enumerate(one.digests, one.span.start):
            assert by_block.get(block, digest) == digest
    assert sorted([*(one.peer_id for one in found.servers), *found.excluded]) == sorted(s.peer_id for s in servers)
    assert compatible_servers(servers[::-1], "main", known).excluded.keys() == found.excluded.keys()
