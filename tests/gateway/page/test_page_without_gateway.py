"""The chat page with responses of the test: failures, browser storage, settings, reading comfort."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops
from playwright.sync_api import Page, Route, expect

from tests.browser import HOST, Answers, failure, open_page, picture, serve_files, stream
from tests.waiting import wait_until

QUOTA = 5 * 2**20
"""Characters that browsers store for a page."""

CONTRAST = """
() => {
  const channels = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = (color) => channels(color).reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = (name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const color = getComputedStyle(probe).color;
    probe.remove();
    return light(color);
  };
  const grounds = ["bg", "surface", "sunken", "bubble"];
  const texts = ["text", "muted", "accent", "danger", "good"];
  const pairs = texts.flatMap((name) => grounds.map((ground) => [name, ground]));
  return [...pairs, ["on-accent", "accent"]].map(([one, other]) => {
    const [high, low] = [seen(one), seen(other)].sort((a, b) => b - a);
    return [one, other, (high + 0.05) / (low + 0.05)];
  });
}
"""


@pytest.fixture
def page(browser):
    with open_page(browser) as opened:
        serve_files(opened.context)
        opened.goto(f"{HOST}/")
        expect(opened.locator("#model")).to_have_value("scripted")
        yield opened


def send(page: Page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Any:
    return page.locator(".message.assistant .body")


def test_a_rate_limited_user_sees_when_to_try_again(page):
    Answers(page, failure(429, "the gateway is busy", **{"Retry-After": "1"}), stream("Now."))
    send(page, "hello")
    again = page.get_by_role("button", name="Try again")
    expect(page.get_by_role("alert").filter(has_text="The gateway is busy.")).to_be_visible()
    expect(again).to_be_disabled()
    expect(again).to_have_text(re.compile(r"Try again in \d s"))
    picture(page, "chat-busy")
    expect(again).to_be_enabled()
    again.click()
    expect(answers(page)).to_have_text(["Now."])
    expect(page.locator(".versions")).to_have_count(0)  # an answer that never began is no version


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (failure(503, "nobody holds blocks 4:8; start a server"), "Nobody holds blocks 4:8; start a server."),
        (failure(400, "the text is too long"), "The text is too long."),
        ({"status": 502, "body": "<h1>Bad Gateway</h1>"}, "The gateway answered 502."),
        (None, "The gateway cannot be reached. Is it running, and are you online?"),
    ],
)
def test_a_failure_says_what_happened_and_can_be_tried_again(page, reply, text):
    Answers(page, reply, stream("Better."))
    send(page, "hello")
    expect(page.locator(".notice.failed p")).to_have_text(text)
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_have_text(["Better."])


def test_what_came_before_the_connection_was_lost_is_kept(page):
    Answers(page, stream("Half an ", whole=False), stream("A whole answer"))
    send(page, "hello")
    expect(page.locator(".notice.failed")).to_contain_text("lost during the answer")
    expect(answers(page)).to_have_text(["Half an "])
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_have_text(["A whole answer"])
    page.get_by_role("button", name="Earlier version").click()
    expect(answers(page)).to_have_text(["Half an "])


@pytest.mark.parametrize(
    "body", ["data: {not json\n\n", 'data: {"choices": 7}\n\n', "\0\0\0", "data: [1]\n\nevent: swarm\ndata: 3\n\n"]
)
def test_an_invalid_response_is_shown_as_an_error(page, body):
    Answers(page, {"body": body, "content_type": "text/event-stream"})
    send(page, "hello")
    expect(page.locator(".notice.failed")).to_be_visible()
    expect(page.locator("#send")).to_be_visible()


def test_an_error_within_the_stream_is_shown(page):
    reply = stream("Some", whole=False)
    reply["body"] += 'data: {"error": {"message": "nobody holds blocks 2:4"}}\n\n'
    Answers(page, reply)
    send(page, "hello")
    expect(page.locator(".notice.failed p")).to_have_text("Nobody holds blocks 2:4.")


def test_strange_details_harm_nothing(page):
    events = [
        {"kind": "route", "hops": [None, {"blocks": 7, "peer": "<b>", "name": "<img src=x onerror=alert(1)>"}]},
        {"kind": "route", "hops": "no"},
        {"kind": "recovered", "seconds": "NaN"},
        {"kind": "news of the future"},
        {"kind": "done", "tokens": "many", "tokens_per_second": None},
    ]
    reply = stream("Fine")
    reply["body"] = "".join(f"event: swarm\ndata: {json.dumps(event)}\n\n" for event in events) + reply["body"]
    Answers(page, reply)
    send(page, "hello")
    page.locator(".figures").click()
    expect(page.locator(".hop-name")).to_have_text(["unnamed", "<img src=x onerror=alert(1)>"])
    expect(page.locator("img")).to_have_count(0)


def test_progress_of_a_long_prompt_is_shown_until_the_answer_begins(page):
    page.evaluate("""() => {
        const body = new TransformStream(), writer = body.writable.getWriter(), encoder = new TextEncoder();
        window.sendEvent = (text) => writer.write(encoder.encode(text));
        window.fetch = async () => new Response(body.readable, { headers: { "Content-Type": "text/event-stream" } });
    }""")
    send(page, "hello")
    waiting = 'event: swarm\ndata: {"kind": "waiting"}\n\n'
    page.evaluate("(text) => { window.sendEvent(text); }", waiting)
    expect(page.locator(".notice.waiting")).to_have_text(re.compile("servers are full"))
    detail = json.dumps({"kind": "prompt", "computed": 2048, "tokens": 8000})
    page.evaluate("(text) => { window.sendEvent(text); }", f": waiting\n\nevent: swarm\ndata: {detail}\n\n")
    expect(page.locator(".notice.waiting")).to_have_text("Reading the conversation: 2,048 of 8,000 tokens")
    picture(page, "chat-reading")
    page.evaluate("(text) => { window.sendEvent(text); }", stream("Fine", whole=False)["body"])
    expect(answers(page)).to_have_text(["Fine"])
    expect(page.locator(".notice")).to_have_count(1)
    expect(page.locator(".notice")).to_be_hidden()


def test_settings_are_sent_and_kept(page):
    requests = Answers(page, stream("Yes."))
    page.get_by_role("button", name="Settings").click()
    for label, value in [("System prompt", "Be brief."), ("Temperature", "0.5"), ("Top p", "7"), ("Seed", "3")]:
        page.get_by_label(label).fill(value)
    expect(page.get_by_label("Top p")).to_have_attribute("aria-invalid", "true")
    picture(page, "chat-settings")
    page.get_by_role("button", name="Done").click()
    page.reload()
    send(page, "hello")
    expect(answers(page)).to_have_text(["Yes."])
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}
    assert requests.bodies == [
        {"model": "scripted", "temperature": 0.5, "seed": 3, "stream": True, "messages": [system, user]}
    ]
    assert requests.headers[0]["x-swarm-details"] == "1"


def test_a_message_that_is_sent_before_the_models_are_known_is_sent_once_they_are(page):
    requests = Answers(page, stream("Yes."))
    held: list[Route] = []
    page.route(f"{HOST}/v1/models", lambda route: held.append(route))
    page.reload()
    send(page, "hello")
    wait_until(lambda: page.evaluate("true") and held)
    expect(page.locator("#prompt")).to_have_value("hello")
    assert requests.bodies == []
    held[0].fallback()
    expect(answers(page)).to_have_text(["Yes."])
    assert [body["messages"][-1]["content"] for body in requests.bodies] == ["hello"]


def test_a_conversation_can_be_renamed_saved_and_deleted(page, tmp_path):
    Answers(page, stream("**Hello** yourself."))
    send(page, "hello")
    expect(answers(page)).to_have_text(["Hello yourself."])
    more = page.get_by_role("button", name=re.compile("^More for"))
    more.click()
    page.get_by_role("menuitem", name="Rename").click()
    page.get_by_role("dialog").get_by_role("textbox").fill("A greeting")
    page.keyboard.press("Enter")
    expect(page.locator("#conversations .open")).to_have_text(["A greeting"])

    def saved(item: str) -> tuple[str, str]:
        more.click()
        with page.expect_download() as download:
            page.get_by_role("menuitem", name=item).click()
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        return file.name, Path(file).read_text()

    assert saved("Save as Markdown") == (
        "a-greeting.md", "# A greeting\n\n## You\n\nhello\n\n## scripted\n\n**Hello** yourself.\n",
    )  # fmt: skip
    name, text = saved("Save as JSON")
    assert name == "a-greeting.json"
    assert {node.get("text") for node in json.loads(text)["nodes"].values()} == {None, "hello", "**Hello** yourself."}

    more.click()
    page.get_by_role("menuitem", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#welcome")).to_be_visible()
    page.reload()
    expect(page.locator("#conversations .open")).to_have_count(0)


def test_a_full_browser_storage_is_reported_and_chats_continue(page):
    Answers(page, stream("Yes."))
    for text in ("first", "second"):
        page.keyboard.press("Control+k")
        send(page, text)
        expect(answers(page)).to_have_text(["Yes."])
    page.evaluate("""(quota) => {
      for (let size = quota; size >= 1; size = Math.floor(size / 2)) {
        try { for (let i = 0; ; i += 1) localStorage.setItem(`filler ${size} ${i}`, "x".repeat(size)); } catch {}
      }
    }""", QUOTA)  # fmt: skip
    page.keyboard.press("Control+k")
    send(page, "third " + "y" * 500)
    expect(answers(page)).to_have_text(["Yes."])
    expect(page.locator("#banner")).to_contain_text("storage is full")
    page.get_by_role("button", name="Delete the five oldest").click()
    expect(page.locator("#banner")).to_be_hidden()
    page.reload()
    expect(answers(page)).to_have_text(["Yes."])
    expect(page.locator("#conversations .open")).to_have_count(1)


def test_storage_that_is_broken_is_left_alone(page):
    good = {
        "id": "good",
        "title": "fine",
        "nodes": {"root": {"id": "root", "parent": None, "children": [], "chosen": None}},
    }
    loop = {"id": "loop", "nodes": {"root": {"id": "root", "parent": None, "children": ["root"], "chosen": "root"}}}
    kept = {"good": good, "loop": loop, "text": "text", "null": None, "list": [1], "other": {**good, "id": "another"}}
    page.evaluate(
        """(kept) => {
          for (const [id, value] of Object.entries(kept)) {
            localStorage.setItem(`swarm.conversation.${id}`, JSON.stringify(value));
          }
          localStorage.setItem("swarm.conversation.broken", "{");
          localStorage.setItem("swarm.settings", "[]");
          localStorage.setItem("swarm.key", "{");
        }""",
        kept,
    )
    page.reload()
    expect(page.locator("#conversations .open")).to_have_text(["fine"])


def test_two_tabs_share_their_conversations(page):
    Answers(page, stream("Yes."))
    other = page.context.new_page()
    other.goto(f"{HOST}/")
    send(page, "from the first tab")
    expect(other.locator("#conversations .open")).to_have_text(["from the first tab"])
    other.locator("#conversations .open").click()
    send(page, "more")
    expect(answers(other)).to_have_text(["Yes.", "Yes."])


def test_a_user_who_scrolled_up_stays_there(page):
    Answers(page, stream(*(f"line {number}\n\n" for number in range(200))))
    send(page, "long")
    expect(page.locator(".message.assistant")).to_contain_text("line 199")
    at_end = "Math.round(scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight) <= 1"
    page.wait_for_function(f"() => {{ const scroll = document.getElementById('scroll'); return {at_end}; }}")
    page.locator("#scroll").hover()
    page.mouse.wheel(0, -600)
    expect(page.locator("#to-end")).to_be_visible()
    before = page.locator("#scroll").evaluate("scroll => scroll.scrollTop")
    page.set_viewport_size({"width": 1280, "height": 700})
    assert page.locator("#scroll").evaluate("scroll => scroll.scrollTop") == before
    page.locator("#to-end").click()
    page.wait_for_function(f"() => {{ const scroll = document.getElementById('scroll'); return {at_end}; }}")


def test_reduced_motion_shows_no_animation(page):
    page.emulate_media(reduced_motion="reduce")
    page.route(f"{HOST}/v1/chat/completions", lambda route: None)  # no answer at all
    send(page, "hello")
    expect(page.get_by_text("Waiting for the first words")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference")
    page.wait_for_function("document.getAnimations().length > 0")
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_have_text("stopped")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_contrast_enough(page, theme):
    """WCAG AA: 4.5 to 1."""
    page.emulate_media(color_scheme=theme)
    weak = [(one, other, ratio) for one, other, ratio in page.evaluate(CONTRAST) if ratio < 4.5]
    assert not weak


def test_what_the_reader_chose_goes_before_the_system(page):
    page.emulate_media(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Light or dark").click()
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == light


def test_an_unreachable_gateway_is_reported_at_the_top(browser):
    with open_page(browser) as page:
        serve_files(page.context)
        page.route(f"{HOST}/v1/models", lambda route: route.abort())
        page.goto(f"{HOST}/")
        expect(page.locator("#banner")).to_contain_text("cannot be reached")
        expect(page.locator("#welcome-model")).to_have_text("No model is served here at present.")
        page.unroute(f"{HOST}/v1/models")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#model")).to_have_value("scripted")
        expect(page.locator("#banner")).to_be_hidden()


PASTE = """
async () => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 30, height: 20 });
  const blob = await new Promise((done) => canvas.toBlob(done));
  const clipboardData = new DataTransfer();
  clipboardData.items.add(new File([blob], "pasted.png", { type: "image/png" }));
  document.getElementById("prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData, cancelable: true }));
}
"""


def test_pictures_are_made_smaller_shown_and_sent_where_the_model_takes_them(browser, tmp_path):
    swarm = {"chat_template": True}
    sees = {"id": "sees", "architecture": {"input_modalities": ["text", "image"]}, "swarm": swarm}
    wide = Image.radial_gradient("L").resize((3000, 1500)).convert("RGB")
    wide.save(tmp_path / "wide.png")
    (tmp_path / "none.png").write_text("no picture")
    with open_page(browser) as page:
        serve_files(page.context, [sees, {"id": "reads", "swarm": swarm}])
        page.goto(f"{HOST}/")
        answered = Answers(page, stream("A light."))
        attach, tray = page.locator("#attach"), page.locator("#pictures .picture")
        page.locator("#model").select_option("reads")
        expect(attach).to_be_hidden()
        page.locator("#model").select_option("sees")
        with page.expect_file_chooser() as chooser:
            attach.click()
        chooser.value.set_files([tmp_path / "none.png", tmp_path / "wide.png"])
        expect(tray).to_have_count(1)
        page.evaluate(PASTE)
        expect(tray).to_have_count(2)
        page.get_by_label("Remove the picture").last.click()
        expect(tray).to_have_count(1)
        picture(page, "chat-picture-tray")
        page.locator("#prompt").fill("What is this?")
        page.keyboard.press("Enter")
        expect(answers(page)).to_have_text("A light.")
        expect(tray).to_have_count(0)
        (shown, asked) = answered.bodies[0]["messages"][0]["content"]
        assert asked == {"type": "text", "text": "What is this?"}
        kind, _, body = shown["image_url"]["url"].partition(",")
        sent = Image.open(io.BytesIO(base64.b64decode(body)))
        assert (kind, sent.format, sent.size) == ("data:image/jpeg;base64", "JPEG", (2048, 1024))
        difference = ImageChops.difference(sent.convert("RGB"), wide.resize(sent.size))
        assert max(high for _, high in difference.getextrema()) < 16, "it is another picture"
        page.reload()
        kept = page.locator(".message.user .picture")
        expect(kept).to_have_js_property("width", 480)
        picture(page, "chat-picture")
        send(page, "And now?")
        expect(answers(page)).to_have_text(["A light.", "A light."])  # it stands there empty before it is asked for
        assert answered.bodies[1]["messages"][0]["content"] == [shown, asked]
