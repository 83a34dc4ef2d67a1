"""How the chat page shows Markdown: usual texts, hostile ones, and text that grows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.browser import HOST, open_page, run_browser, serve_files

SHOW = """
async (cases) => {
  const { MarkdownView } = await import("/page/markdown/markdown_view.js");
  return cases.map(([text, cuts]) => {
    const container = document.createElement("div");
    const view = new MarkdownView(container);
    for (const cut of cuts) view.update(text.slice(0, cut));
    view.update(text);
    return container.innerHTML;
  });
}
"""
SHOWN_TEXT = """
async (text) => {
  const { MarkdownView } = await import("/page/markdown/markdown_view.js");
  const container = document.createElement("div");
  new MarkdownView(container).update(text);
  const found = (selector) => [...container.querySelectorAll(selector)];
  return {
    length: container.textContent.length,
    tags: [...new Set(found("*").map((node) => node.localName))].sort(),
    attributes: [...new Set(found("*").flatMap((node) => node.getAttributeNames()))],
    addresses: found("[href]:not(use)").map((node) => node.getAttribute("href")),
  };
}
"""
TAGS = {
    *("a", "blockquote", "br", "button", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol"),
    *("p", "pre", "span", "strong", "svg", "table", "tbody", "td", "th", "thead", "tr", "ul", "use"),
}
ATTRIBUTES = {
    *("aria-hidden", "aria-label", "checked", "class", "disabled", "href", "rel", "role", "start", "tabindex"),
    *("target", "title", "type"),
}
PIECES = [
    *("a", "word ", "1. ", "- ", "  ", "    ", "\n", "\n\n", "> ", "# ", "`", "```", "```py\n", "*", "**", "_", "__"),
    *("~~", "[", "](", ")", "!", "|", "|-|-|\n", "| x | y |\n", "---\n", "\\", "https://a.example/x"),
    *("javascript:f()", "<b>", "[ ] ", "[x] ", "10) ", "é", "🐝", "\t", "\r\n", "&lt;", "2."),
]


@pytest.fixture(scope="module")
def page():
    with run_browser() as browser, open_page(browser) as opened:
        serve_files(opened.context)
        opened.goto(f"{HOST}/")
        yield opened


def show(page: Any, *texts: tuple[str, list[int]]) -> list[str]:
    """The HTML of each text after it has grown in these steps (UTF-16 code units)."""
    return list(page.evaluate(SHOW, texts))


def link(address: str, inner: str) -> str:
    return f'<a href="{address}" title="{address}" target="_blank" rel="noopener noreferrer nofollow">{inner}</a>'


def test_markdown_becomes_these_nodes(page):
    for text, wanted in [
        ("plain", "<p>plain</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("**bold** and *thin*", "<p><strong>bold</strong> and <em>thin</em></p>"),
        ("***both***", "<p><strong><em>both</em></strong></p>"),
        ("a ~~b~~ c", "<p>a <del>b</del> c</p>"),
        ("snake_case_name and 2 * 3 * 4 ****", "<p>snake_case_name and 2 * 3 * 4 ****</p>"),
        ("**not closed", "<p>**not closed</p>"),
        (r"\*no\* `*code*` ``a ` b``", "<p>*no* <code>*code*</code> <code>a ` b</code></p>"),
        ("## Title ##", '<h4 class="level-2">Title</h4>'),
        ("#no title", "<p>#no title</p>"),
        ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        ("> quoted\n> > twice", "<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote></blockquote>"),
        ("- a\n- b", "<ul><li><span>a</span></li><li><span>b</span></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li><span>a</span></li><li><span>b</span></li></ol>'),
        (
            "1. a\n   - b\n2. c",
            "<ol><li><span>a</span><ul><li><span>b</span></li></ul></li><li><span>c</span></li></ol>",
        ),
        ("10. a\n  - b", '<ol start="10"><li><span>a</span><ul><li><span>b</span></li></ul></li></ol>'),
        ("- a\n\n  more\n- b", "<ul><li><span>a</span><p>more</p></li><li><span>b</span></li></ul>"),
        ("It was\n1984. A year", "<p>It was<br>1984. A year</p>"),
        (
            "- [x] done",
            '<ul><li class="task"><input type="checkbox" disabled="" checked=""><span>done</span></li></ul>',
        ),
        ("x https://a.example/b?c=d.", f"<p>x {link('https://a.example/b?c=d', 'https://a.example/b?c=d')}.</p>"),
        ("[**t**](https://a.example/)", f"<p>{link('https://a.example/', '<strong>t</strong>')}</p>"),
        ("![alt](https://a.example/i.png)", f"<p>{link('https://a.example/i.png', 'alt')}</p>"),
        ("[a](javascript:f()) [b](/v1/models)", "<p>[a](javascript:f()) [b](/v1/models)</p>"),
        ("[a](JaVaScRiPt:f) [b](vbscript:f)", "<p>[a](JaVaScRiPt:f) [b](vbscript:f)</p>"),
        ("<javascript:f> [c](data:text/html,x)", "<p>&lt;javascript:f&gt; [c](data:text/html,x)</p>"),
        ("<script>f()</script>", "<p>&lt;script&gt;f()&lt;/script&gt;</p>"),
        ("<img src=x onerror=f()>", "<p>&lt;img src=x onerror=f()&gt;</p>"),
        ("&lt;b&gt; &amp;", "<p>&amp;lt;b&amp;gt; &amp;amp;</p>"),
    ]:
        assert show(page, (text, [])) == [wanted]


def test_code_keeps_every_character(page):
    text = "```python\ndef f():\n    return '<b>&amp;</b>' # `*x*`\n\n\n```\nafter"
    (shown,) = show(page, (text, []))
    assert "<code>def f():\n    return '&lt;b&gt;&amp;amp;&lt;/b&gt;' # `*x*`\n\n</code>" in shown
    assert "<span>python</span>" in shown
    assert shown.endswith("<p>after</p>")


def test_a_table_has_its_columns(page):
    text = "Look:\n| a | b |\n|:--|--:|\n| `x\\|y` | 2 |\n| 3 |\n\nend"
    (shown,) = show(page, (text, []))
    assert shown.startswith("<p>Look:</p>")
    assert '<th class="start">a</th><th class="end">b</th>' in shown
    assert '<td class="start"><code>x|y</code></td><td class="end">2</td>' in shown
    assert '<td class="start">3</td><td class="end"></td>' in shown


def test_text_that_grows_looks_like_the_complete_text(page):
    """Property: any text, cut anywhere, is shown as if it had come at once, with no node that does not belong there."""
    chance = random.Random(6)
    for _ in range(250):
        text = "".join(chance.choices(PIECES, k=chance.randint(1, 40)))
        cuts = sorted(chance.sample(range(len(text) + 1), k=min(len(text), 25)))
        grown, whole = show(page, (text, cuts), (text, []))
        assert grown == whole, (text, cuts)
        seen = page.evaluate(SHOWN_TEXT, text)
        assert set(seen["tags"]) <= TAGS, text
        assert set(seen["attributes"]) <= ATTRIBUTES, text
        assert all(address.startswith("https://a.example/") for address in seen["addresses"]), text


def test_hostile_text_does_not_stop_the_page(page):
    """Quadratic time or endless nesting would exceed the page's time limit."""
    for text in [
        "> " * 50_000,
        "\n".join("  " * depth + "- x" for depth in range(300)),
        "[" * 100_000,
        "**a " * 2500 + "b** " * 2500,
        "*_~~" * 2400,
        "[" * 2400 + "](https://a.example/)" * 300,
        "`" * 10 + "``x" * 3000,
        "|" * 100_000 + "\n" + "|-" * 100_000,
        "```" * 30_000,
        ("```" + " " * 1900 + "`\n") * 300,
        "x" * 1_000_000,
        "line\n" * 100_000,
        "https://" * 2000,
    ]:
        seen = page.evaluate(SHOWN_TEXT, text)
        assert set(seen["tags"]) <= TAGS
        assert seen["length"] <= 2 * len(text) + 100


def test_only_the_end_of_a_long_text_is_drawn_again(page):
    """Nodes that are drawn once stay, so that thousands of tokens are drawn quickly and a selection is kept."""
    kept = page.evaluate("""async () => {
      const { MarkdownView } = await import("/page/markdown/markdown_view.js");
      const container = document.createElement("div");
      const view = new MarkdownView(container);
      let text = "";
      for (let i = 0; i < 200; i += 1) view.update(text += `paragraph ${i}\\n\\n`);
      const before = [...container.children];
      const code = "```\\n" + "x\\n".repeat(50);
      view.update(text + code);
      const node = container.lastChild.querySelector("code").firstChild;
      view.update(text + code + "more\\n".repeat(50));
      const after = [...container.children];
      return before.every((paragraph, index) => paragraph === after[index])
        && container.lastChild.querySelector("code").firstChild === node && node.data.endsWith("more\\n");
    }""")
    assert kept is True
