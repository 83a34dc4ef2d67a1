"""The chat page in a browser, on a real gateway of a real three-server swarm, with models whose texts are known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from transformers import AutoTokenizer, LlamaForCausalLM

from swarm.gateway import api_keys
from swarm.gateway.settings import GatewaySettings
from tests.browser import open_page, picture
from tests.gateways import run_gateway
from tests.scripted import CHAT_TEMPLATE, make_scripted
from tests.swarms import run_swarm
from tests.waiting import wait_until

SPANS = ("0:2", "2:4", "4:6")
HELLO = "Hello! I am a swarm of **three** small servers, and each of us holds *two* blocks of this model.\n"
EVIL = (
    "<script>window.ran = 1</script>\n\n<img src=x onerror='window.ran = 2'>\n\n[click](javascript:window.ran=3)\n\n"
    "<iframe src='javascript:parent.ran=4'></iframe> <svg onload=window.ran=5> "
    "![i](javascript:window.ran=6) <a href='javascript:window.ran=7'>x</a> `<b onclick=f()>` **safe**\n\n"
    "```html\n<script>window.ran = 8</script>\n```\n"
)
WIDE = (
    "# A table, code, and words without end\n\n| Left column | Middle column | Right column | One more column |\n"
    "|---|:--:|--:|---|\n| a long cell of many words | `code_that_does_not_break_anywhere` | 3.14159265 | last |\n\n"
    "```python\n" + "print('" + "a line that is far too long for a telephone, " * 3 + "')\n```\n\n"
    + "Unbreakable" * 12 + "\n\n1. one\n   - two\n2. three\n\n> quoted, https://example.com/" + "path/" * 20 + "end\n"
)  # fmt: skip
LONG = "".join(f"Line {number} of many, which say that it goes on.\n\n" for number in range(120))
FOREVER = "".join(f"Line {number} of a text that goes on until it is stopped.\n\n" for number in range(10))
MAX_TOKENS = 30_000
"""Tokens of an answer: more than are written while a test waits for anything."""
CACHE_TOKENS = 4 * MAX_TOKENS

STORY = " there lived a beekeeper who counted every light of the evening, one by one, until it was dark."
THINKING = "<think>\nThey greet me, so I\n<b>greet</b>.\n</think>\n\nGood evening to you."
SCRIPTS = {"@hello": HELLO, "@evil": EVIL, "@wide": WIDE, "@long": LONG, "@forever": FOREVER, "@think": THINKING}


def never_end(folder: Path, word: str) -> None:
    """Let what a model says after `word` begin anew where it would end."""
    model = LlamaForCausalLM.from_pretrained(folder)
    head_VH = model.get_output_embeddings().weight.data
    end = model.config.eos_token_id
    first = last = int(head_VH[:, AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(word)].argmax())
    while (following := int(head_VH[:, last].argmax())) != end:
        last = following
    head_VH[[first, end], last] = head_VH[[end, first], last]
    model.config.max_position_embeddings = 2 * MAX_TOKENS
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    chatty = make_scripted(folder / "chatty", SCRIPTS, "{# <think> </think> #}" + CHAT_TEMPLATE)
    never_end(chatty, "@forever")
    with run_swarm(chatty, SPANS, cache_tokens=CACHE_TOKENS) as running:
        story = make_scripted(folder / "story", {"": STORY})
        (story / "chat_template.jinja").unlink()
        running.start("0:6", model=str(story)).wait_ready()
        yield running


@pytest.fixture(scope="module")
def gateway(swarm):
    models = [swarm.model, swarm.model.replace("chatty", "story")]
    settings = GatewaySettings(default_max_tokens=MAX_TOKENS)
    with run_gateway(swarm, models, settings=settings, with_monitor=True) as running:
        yield running


@pytest.fixture
def page(browser, gateway):
    with open_page(browser) as opened:
        opened.goto(gateway.url)
        expect(opened.locator("#model")).to_have_value("chatty")
        yield opened


def send(page: Page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")


def whole(page: Page) -> Any:
    """The last answer, once it is complete."""
    expect(page.locator(".message.running")).to_have_count(0)
    return page.locator(".message.assistant .body").last


def words(text: str) -> str:
    """Markdown's plain paragraphs as they are shown."""
    return " ".join(text.split())


def test_a_message_is_sent_and_answered_by_keyboard_only(page, swarm):
    expect(page.locator("#welcome-model")).to_have_text(re.compile("chatty.*held by 3 servers"))
    picture(page, "chat-welcome")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("Say @hello")
    page.keyboard.press("Shift+Enter")
    expect(page.locator("#prompt")).to_have_value("Say @hello\n")
    page.keyboard.press("Enter")
    expect(whole(page)).to_have_text(HELLO.replace("*", "").strip())
    expect(page.locator(".body strong")).to_have_text("three")
    expect(page.locator("#status")).to_contain_text("Hello! I am a swarm")

    figures = page.locator(".figures")
    expect(figures).to_have_text(re.compile(r"^[\d.]+ tokens/s$"))
    figures.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".hop-blocks")).to_have_text([f"blocks {span}" for span in SPANS])
    expect(page.locator(".hops code")).to_have_text(["…" + server.peer_id[-6:] for server in swarm.servers[:3]])
    expect(page.locator(".facts p")).to_have_text(re.compile(r"^\d+ tokens in .* · first after .*$"))
    picture(page, "chat-answer")

    page.keyboard.press("Control+k")
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()


@pytest.mark.parametrize("model", ["chatty", "story"])
def test_all_suggestions_are_in_sight(page, model):
    page.locator("#model").select_option(model)
    last = page.locator(".suggestion").last
    expect(page.locator(".suggestion")).to_have_count(4)
    ends = last.bounding_box()["y"] + last.bounding_box()["height"]
    assert ends <= page.locator(".dock").bounding_box()["y"]


def test_thoughts_are_folded(page):
    send(page, "Now @think")
    expect(whole(page)).to_have_text("Good evening to you.")
    thoughts = page.locator(".thoughts")
    expect(thoughts.locator("p")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("p")).to_have_text("They greet me, so I\n<b>greet</b>.")
    page.reload()
    expect(page.locator(".thoughts")).to_contain_text("They greet me")


def test_stop_ends_the_computation_and_keeps_the_text(page, gateway):
    send(page, "Say @forever")
    expect(page.locator(".message.assistant")).to_contain_text("Line 3")
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_contain_text("stopped")
    expect(page.locator(".message.assistant")).to_contain_text("Line 3")
    wait_until(lambda: gateway.metric("swarm_gateway_running") == 0)
    expect(page.locator("#prompt")).to_be_focused()


def test_a_reload_brings_everything_back(page, gateway):
    send(page, "Say @hello")
    expect(whole(page)).to_contain_text("Hello!")
    page.reload()
    expect(page.locator(".message.assistant .body")).to_have_text(HELLO.replace("*", "").strip())
    expect(page.locator(".figures")).to_contain_text("tokens/s")

    send(page, "Now @forever")
    expect(page.locator(".message.assistant").last).to_contain_text("Line 3")
    page.reload()  # in mid-answer
    expect(page.locator(".message.assistant").last).to_contain_text("Line 3")
    expect(page.locator(".figures").last).to_contain_text("stopped")
    expect(page.locator("#conversations .open")).to_have_text(["Say @hello"])
    wait_until(lambda: gateway.metric("swarm_gateway_running") == 0)


def test_an_answer_can_be_written_again_and_a_question_changed(page):
    send(page, "Say @hello")
    expect(whole(page)).to_contain_text("Hello!")
    page.get_by_role("button", name="Write another answer").click()
    expect(page.locator(".versions span")).to_have_text("2/2")
    expect(whole(page)).to_contain_text("Hello!")

    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_have_text("Say @hello")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Rather say @evil")
    page.keyboard.press("Enter")
    expect(whole(page)).to_contain_text("safe")
    expect(page.locator(".user .versions span")).to_have_text("2/2")

    page.locator(".user [aria-label='Earlier version']").click()
    expect(page.locator(".bubble")).to_have_text("Say @hello")
    expect(page.locator(".assistant .versions span")).to_have_text("2/2")
    expect(page.locator(".user [aria-label='Later version']")).to_be_focused()
    page.locator(".assistant [aria-label='Earlier version']").click()
    page.reload()
    expect(page.locator(".assistant .versions span")).to_have_text("1/2")


def test_nothing_that_a_model_writes_runs(page):
    send(page, "Say @evil")
    expect(whole(page)).to_contain_text("safe")
    assert page.evaluate("window.ran") is None
    for selector in ("script", "img", "iframe", "[onclick]", "[onload]", "[onerror]", "a[href]"):
        expect(page.locator(f"#messages {selector}")).to_have_count(0)
    expect(page.locator(".body > p").first).to_have_text("<script>window.ran = 1</script>")
    expect(page.locator(".body pre code")).to_have_text("<script>window.ran = 8</script>")
    picture(page, "chat-hostile")


def test_a_telephone_shows_everything_without_scrolling_sideways(page):
    page.set_viewport_size({"width": 400, "height": 800})
    picture(page, "chat-narrow-welcome")
    send(page, "Say @wide")
    expect(whole(page)).to_contain_text("three")
    wide = "[document.documentElement, document.body, document.getElementById('scroll')].map(node => node.scrollWidth)"
    assert page.evaluate(wide) == [400, 400, 400]
    page.locator("#scroll").evaluate("scroll => { scroll.scrollTop = 0 }")
    picture(page, "chat-narrow")
    page.get_by_role("button", name="Conversations").click()
    expect(page.get_by_role("button", name="Close the list")).to_be_focused()
    picture(page, "chat-drawer")
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.get_by_role("button", name="Conversations")).to_be_focused()


@pytest.mark.slow
def test_a_server_is_killed_in_mid_answer(page, swarm):
    send(page, "Say @long")
    answer = page.locator(".message.assistant")
    expect(answer).to_contain_text("Line 3")
    swarm.holders("2:4")[0].kill()
    expect(page.locator(".notice.warning")).to_contain_text(re.compile("A server was lost|No server holds blocks 2:4"))
    picture(page, "chat-recovering")
    swarm.start("2:4", cache_tokens=CACHE_TOKENS).wait_ready()
    expect(page.locator(".notice.good")).to_be_visible(timeout=60_000)
    expect(page.locator(".message.running")).to_have_count(0, timeout=60_000)
    assert words(page.locator(".body").inner_text()) == words(LONG)
    page.locator(".figures").click()
    expect(page.locator(".facts p")).to_contain_text("lost and replaced within")


def test_another_model_continues_texts(page):
    page.locator("#model").select_option("story")
    expect(page.get_by_text("This model continues texts.")).to_be_visible()
    send(page, "Once upon a time")
    expect(whole(page)).to_have_text(STORY.strip())
    page.get_by_role("button", name="Continue").click()
    bodies = page.locator(".message.assistant .body")
    expect(bodies).to_have_text([STORY.strip()] * 2)
    expect(page.locator(".message.running")).to_have_count(0)
    page.set_viewport_size({"width": 390, "height": 800})
    first, second = bodies.first.bounding_box(), bodies.last.bounding_box()
    assert second["y"] - first["y"] - first["height"] < 20  # one text
    button = page.get_by_role("button", name="Continue").bounding_box()
    assert button["height"] <= 40
    assert button["x"] + button["width"] <= 390
    page.reload()
    expect(page.locator("#model")).to_have_value("story")
    expect(page.get_by_role("button", name="Continue")).to_have_count(1)


def test_dark_is_dark(page):
    page.emulate_media(color_scheme="dark")
    send(page, "Say @wide")
    expect(whole(page)).to_contain_text("three")
    red, green, blue = map(
        int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert max(red, green, blue) < 64
    page.locator("#scroll").evaluate("scroll => { scroll.scrollTop = 0 }")
    picture(page, "chat-dark")


def test_a_gateway_with_keys_asks_for_one(browser, swarm, tmp_path):
    secret = api_keys.add_key(tmp_path / "keys.yaml", "ann", api_keys.KeyLimits())
    with run_gateway(swarm, keys=tmp_path / "keys.yaml") as gateway, open_page(browser) as page:
        page.goto(gateway.url)
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("This gateway requires an API key.")
        picture(page, "chat-key")
        page.keyboard.type("sk-swarm-wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("does not know this key")
        dialog.get_by_role("textbox").fill(secret)
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_value("chatty")
        send(page, "Say @hello")
        expect(whole(page)).to_contain_text("Hello!")
        page.reload()
        expect(page.locator("#model")).to_have_value("chatty")
        expect(dialog).to_be_hidden()
