"""Makes the pictures of the chat page in `docs/pictures`, with a real swarm of three servers and known texts.

Run it with `python -m scripts.screenshots`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.browser import open_page, run_browser
from tests.gateways import run_gateway
from tests.scripted import make_scripted
from tests.swarms import run_swarm

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
OWNERS = {"0:2": "ann's laptop", "2:4": "lab workstation", "4:6": "bea"}

FIREFLIES = """\
Each firefly needs to know **very little** to find its swarm:

1. When it sees a light nearby, it moves a bit closer.
2. When it gets too close, it moves away again.
3. All the rest of the time, it flies where the *others* fly.

```python
def step(firefly, swarm, reach=5.0):
    near = [other for other in swarm if 0 < firefly.distance(other) < reach]
    if not near:
        return firefly.wander()
    return firefly.toward(mean(near)).away_from(closest(near))
```

| What it sees      | What it does     |
|:------------------|:-----------------|
| nobody            | wanders          |
| a light far off   | turns towards it |
| a light too near  | turns away       |

No one leads, and nobody has to stay: the pattern holds when some of them leave.
"""
SCRIPTS = {"fireflies?": FIREFLIES}


def main() -> None:
    """Write all pictures."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_scripted(Path(folder) / "firefly", SCRIPTS)
        first, *others = OWNERS
        with run_swarm(model, [first], name=OWNERS[first]) as swarm:
            for blocks in others:
                swarm.start(blocks, name=OWNERS[blocks]).wait_ready()
            with run_gateway(swarm, shows_swarm=True) as gateway, run_browser() as browser:
                _welcome(browser, gateway.url)
                _answer(browser, gateway.url)
                _narrow(browser, gateway.url)


def _welcome(browser: Browser, url: str) -> None:
    with open_page(browser, color_scheme="dark", viewport={"width": 1200, "height": 760}) as page:
        page.goto(url)
        expect(page.locator("#welcome-model")).to_contain_text("carried by 3 servers")
        _picture(page, "chat-welcome")


def _answer(browser: Browser, url: str) -> None:
    with open_page(browser, color_scheme="light", viewport={"width": 1200, "height": 1010}) as page:
        _ask(page, url)
        page.locator(".figures").click()
        page.locator("#prompt").focus()
        _picture(page, "chat-answer")


def _narrow(browser: Browser, url: str) -> None:
    with open_page(browser, color_scheme="dark", viewport={"width": 400, "height": 760}) as page:
        _ask(page, url)
        page.locator("#scroll").evaluate("scroll => { scroll.scrollTop = 0 }")
        _picture(page, "chat-narrow")


def _ask(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#model")).to_be_enabled()
    page.locator("#prompt").fill("What can a swarm of machines learn from fireflies?")
    page.keyboard.press("Enter")
    expect(page.locator(".figures")).to_contain_text("tokens/s")


def _picture(page: Page, name: str) -> None:
    page.mouse.move(0, 0)
    page.screenshot(path=PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
