"""The monitor's page in a real browser, over swarms that the tests describe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from swarm.data_structures import ServerState
from swarm.monitor.history import POINT_INTERVAL_S, SwarmHistory
from swarm.monitor.swarm_poller import PollResult, build_swarm_view
from swarm.routing.suspicion import Opinion
from tests.browser import open_page, picture
from tests.infos import server_info
from tests.monitor.serving import Monitor, serve
from tests.monitor.sources import DescribedSwarm, found

HOSTILE = "<img src=x onerror=document.title='taken'>"
SERVERS = (
    server_info(0, 4, "peer-one", name="Ann's laptop", throughput=900.0, adapters=("org/pirate",)),
    server_info(4, 8, "peer-two", name="kiwi", throughput=200.0, relayed=True, quantization="int8", queue_delay=0.02),
    server_info(2, 8, "peer-three", name="Büro 3", throughput=660.0),
    server_info(
        8,
        12,
        "peer-four",
        name="tiny",
        throughput=400.0,
        cache_tokens_free=16384,
        sparse=True,
        perplexity_loss=0.004,
        exit_blocks=(9, 10),
        exit_confidences=("similarity",),
    ),
)
TRIPS = {"peer-one": 0.012, "peer-two": 0.19, "peer-three": 0.0004}


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    opinions = {"peer-two": Opinion(agreed=12, differed=1)}
    with serve(DescribedSwarm(found(12, *SERVERS), trips=TRIPS), opinions=opinions) as monitor:
        yield monitor


@pytest.fixture
def page(browser: Browser, monitor: Monitor) -> Iterator[Page]:
    with open_page(browser) as page:
        page.goto(monitor.url)
        expect(page.locator(".cells button")).to_have_count(12)
        yield page


def cell(page: Page, block: int) -> Any:
    return page.locator(".cells button").nth(block)


def test_the_strip_shows_coverage_and_the_weakest_block(page: Page) -> None:
    expect(page.get_by_role("heading", name="org/model")).to_be_visible()
    expect(page.locator(".figure")).to_have_text("100tokens/s at the weakest block, 8")
    expect(cell(page, 0)).to_have_text("1")
    expect(cell(page, 3)).to_have_text("2")
    expect(cell(page, 8)).to_have_attribute("data-weakest", "")
    expect(cell(page, 3)).to_have_attribute("aria-label", "Block 3: 335 tokens/s from 2 servers")
    expect(page.locator(".missing")).to_be_hidden()
    cell(page, 3).hover()
    expect(page.locator(".strip .sentence")).to_have_text("Block 3: 335 tokens/s from 2 servers – Ann's laptop, Büro 3")
    expect(page.locator('.bar[data-holds="true"]')).to_have_text(["Ann's laptop", "Büro 3"])


def test_the_table_says_everything_of_a_server(page: Page) -> None:
    row = page.get_by_role("row", name="kiwi")
    expect(row.get_by_role("cell")).to_have_text(
        [
            *("4:8", "50", "20 ms", "1,048,576", "190 ms", "relayed", "int8 (float32)", "1"),
            *("12 of 13 agree", "–", "may move to other blocks"),
        ]
    )
    expect(page.get_by_role("row", name="Ann's laptop")).to_contain_text("org/pirate")
    expect(page.get_by_role("row", name="tiny").get_by_role("cell").nth(4)).to_have_text("–")
    expect(page.get_by_role("row", name="tiny")).to_contain_text("float32, sparse (+0.4% perplexity), exits at 9, 10")


def test_the_keyboard_goes_through_the_strip(page: Page) -> None:
    cell(page, 0).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    expect(cell(page, 1)).to_be_focused()
    expect(page.locator(".strip .sentence")).to_contain_text("Block 1: 225 tokens/s")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    expect(cell(page, 11)).to_be_focused()
    # The strip is one stop of the tabulator, not twelve.
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="1 h", exact=True)).to_be_focused()


def test_a_gap_opens_and_closes_without_a_reload(page: Page, monitor: Monitor) -> None:
    page.evaluate("window.stays = document.querySelector('.cells button')")
    joining = server_info(8, 12, "peer-five", name="helper", state=ServerState.JOINING, digests=())
    monitor.swarm.found = (found(12, *SERVERS[:3], joining),)
    expect(cell(page, 9)).to_have_attribute("data-level", "1")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("No server holds blocks 8:12, so this model cannot answer now. Servers are loading")
    expect(alert.locator("code")).to_have_text("swarm server org/model --blocks 8:12 --initial-peers ADDRESS")
    expect(page.locator(".figure")).to_have_text("4blocks are missing")
    monitor.swarm.found = (found(12, *SERVERS[:3]),)
    expect(cell(page, 9)).to_have_attribute("data-level", "0")
    expect(cell(page, 9)).to_have_text("×")
    expect(cell(page, 9)).to_have_attribute("aria-label", "Block 9 is missing: no server holds it")
    monitor.swarm.found = (found(12, *SERVERS),)
    expect(alert).to_be_hidden()
    expect(cell(page, 9)).to_have_text("1")
    assert page.evaluate("window.stays === document.querySelector('.cells button')")


def test_what_peers_call_themselves_is_only_text(browser: Browser) -> None:
    info = server_info(
        0, 1, "peer", name=HOSTILE, version=HOSTILE, quantization=HOSTILE, adapters=(HOSTILE,), revision="other"
    )
    joining = server_info(1, 2, HOSTILE, state=ServerState.JOINING, digests=(), name="\u202e\x1b[2J<script>")
    with serve(DescribedSwarm(found(3, info, joining, name=HOSTILE))) as monitor, open_page(browser) as page:
        page.goto(monitor.url)
        expect(page.locator("h2")).to_have_text(HOSTILE)
        expect(page.locator("tbody th span")).to_have_text([HOSTILE, "��[2J<script>"])
        expect(page.locator("main img, main script")).to_have_count(0)
        # No command is offered for such a name.
        expect(page.locator(".command")).to_have_count(0)
        expect(page).to_have_title("swarm monitor")


def test_a_large_model_on_a_narrow_screen(browser: Browser) -> None:
    servers = [
        server_info(
            start, min(start + 9, 126), f"peer{start}", name=f"volunteer number {start}", throughput=90.0 + start
        )
        for start in range(0, 126, 7)
        if start != 63
    ]
    gap = [s for s in servers if not (s.span.start <= 70 < s.span.end)]
    with serve(DescribedSwarm(found(126, *gap, name="organisation/a-rather-long-name-of-a-model-405b"))) as monitor:
        with open_page(browser, viewport={"width": 400, "height": 800}) as page:
            page.goto(monitor.url)
            expect(page.locator(".cells button")).to_have_count(126)
            assert page.evaluate("document.documentElement.scrollWidth") == 400
            expect(page.get_by_role("alert")).to_contain_text("No server holds blocks 65:77")
            # A finger is wider than a cell: what counts is the place along the strip.
            box = page.locator(".cells").bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + box["width"] * 70.5 / 126, box["y"] + 10)
            expect(page.locator(".strip .sentence")).to_have_text("Block 70 is missing: no server holds it")
            picture(page, "monitor-126-blocks-narrow")


def test_the_last_hours_as_a_plot(browser: Browser) -> None:
    history, now = SwarmHistory(), time.time()
    for minute in range(300):
        servers = SERVERS[:3] if 100 <= minute < 110 else SERVERS
        look = PollResult((found(12, *servers),))
        history.record(build_swarm_view(look, {}, (), now - (300 - minute) * POINT_INTERVAL_S, 10.0))
    with serve(DescribedSwarm(found(12, *SERVERS))) as monitor:
        monitor.poller.history = history
        with open_page(browser) as page:
            page.goto(monitor.url)
            expect(page.locator(".plot .sentence")).to_have_text("Blocks were missing for 10 minutes of this time.")
            expect(page.locator("figure").first.locator(".gap")).to_have_count(10)
            expect(page.locator("figure svg").first).to_have_attribute(
                "aria-label", "Tokens/s of the weakest block, now 100, most 100, least 0"
            )
            page.get_by_role("button", name="1 h", exact=True).click()
            expect(page.locator(".plot .sentence")).to_have_text("No blocks were missing during this time.")
            picture(page, "monitor-described")


def test_a_monitor_that_goes_and_comes_back(browser: Browser) -> None:
    swarm = DescribedSwarm(found(12, *SERVERS))
    with open_page(browser) as page:
        with serve(swarm) as monitor:
            page.goto(monitor.url)
            expect(page.locator("#live")).to_have_text("live")
            swarm.error = RuntimeError("the network is down")
            expect(page.locator("#live")).to_have_text("stale")
            expect(page.locator("#problem")).to_contain_text("the network is down")
            swarm.error = None
            expect(page.locator("#live")).to_have_text("live")
            expect(page.locator("#problem")).to_be_hidden()
        expect(page.locator("#live")).to_have_text("reconnecting")
        expect(page.locator("#problem")).to_contain_text("no connection to the monitor")
        expect(page.locator(".cells button")).to_have_count(12)  # what was seen stays


def test_a_monitor_that_asks_for_a_key(browser: Browser, monitor: Monitor) -> None:
    with open_page(browser) as page:

        def guard(route: Any) -> None:
            if route.request.headers.get("authorization") == "Bearer secret":
                route.continue_()
            else:
                route.fulfill(status=401, body="{}")

        page.route("**/api/**", guard)
        page.goto(monitor.url)
        page.get_by_label("This monitor needs an API key.").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_label("This monitor needs an API key.").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator(".cells button")).to_have_count(12)
        expect(page.locator("#key-form")).to_be_hidden()
