from __future__ import annotations

import re

import click

from swarm.data_structures import ServerState
from swarm.monitor.swarm_poller import PollResult, build_swarm_view
from swarm.monitor.swarm_view import build_model_view
from swarm.monitor.terminal_text import (
    block_strip,
    display_width,
    format_swarm,
)
from tests.infos import server_info
from tests.monitor.sources import found

SERVERS = (
    server_info(0, 3, "QmFirst", name="Ann's laptop", throughput=300.0, adapters=("org/pirate",), queue_delay=0.012),
    server_info(0, 2, "QmSecond", name="日本", throughput=40.0, relayed=True, quantization="int8"),
    server_info(4, 5, "QmThird", revision="older"),
    server_info(3, 4, "QmFourth", state=ServerState.JOINING, digests=()),
)


def shown(*models, width: int = 100, **look) -> str:
    return format_swarm(
        build_swarm_view(PollResult(models, **look), {"QmFirst": 0.0123, "QmSecond": 1.5}, ("/addr",), 0.0, 10.0), width
    )


def test_a_swarm_with_everything_in_it():
    lines = click.unstyle(shown(found(5, *SERVERS))).split("\n")
    assert lines[:5] == [
        # Of two servers the quicker one is believed up to four times the slower one's rate.
        "org/model: 5 blocks, 2 servers, 2 blocks are missing, weakest block 2 with 80 tokens/s",
        "0 ▅▅▄××",
        "× blocks 3:5 are missing; 1 joining now. Serve them:",
        "    swarm server org/model --blocks 3:5 --initial-peers /addr",
        "",
    ]
    assert [re.split("  +", line.strip()) for line in lines[5:]] == [
        ["blocks", "server", "peer", "state", "tokens/s", "queue", "cache free", "ping", "precision", "version"],
        ["0:2", "日本", "…Second", "online", "20", "0 ms", "1,048,576", "relayed 1500 ms", "int8, float32", "1"],
        ["0:3", "Ann's laptop", "…mFirst", "online", "100", "12 ms", "1,048,576", "12 ms", "float32", "1"],
        ["adapters: org/pirate"],
        ["3:4", "-", "…Fourth", "joining", "1", "0 ms", "1,048,576", "?", "float32", "1"],
        ["4:5", "-", "…mThird", "online", "1", "0 ms", "1,048,576", "?", "float32", "1"],
        ["not used: it serves revision older, most serve main"],
    ]
    first, second = (line[: line.index("…")] for line in (lines[6], lines[7]))
    assert display_width(first) == display_width(second)


def test_a_server_that_selects_neurons_is_marked():
    swarm = found(
        2,
        server_info(0, 1, "QmFirst", sparse=True, perplexity_loss=0.0042),
        server_info(1, 2, "QmSecond", sparse=True, compute_dtype="bfloat16"),
    )
    lines = click.unstyle(shown(swarm)).split("\n")
    assert any("float32, sparse (+0.4% perplexity)" in line for line in lines)
    assert any("bfloat16, sparse  " in line for line in lines)


def test_nothing_and_trouble():
    assert shown().startswith("No models")
    assert "gone: no server of this swarm serves it" in click.unstyle(shown(absent=("gone",)))
    absent = shown(absent=("gone",), others=("here", "too"))
    assert "gone: no server of this swarm serves it; it serves here, too" in click.unstyle(absent)
    assert "3 more models are announced" in shown(found(1), left_out=3)


def test_a_long_strip_is_broken_into_lines_of_tens():
    model = build_model_view(found(126, server_info(0, 126)), {})
    lines = click.unstyle(block_strip(model, 60)).split("\n")
    assert [line[:4] for line in lines] == ["  0 ", " 50 ", "100 "]
    assert [len(line) - 4 for line in lines] == [50, 50, 26]
