"""What models write, as the chat page shows it: Markdown, hostile text, and a lot of it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser]

HOSTILE = """<img src=x onerror="alert(1)"> <script>alert(2)</script> <b>bold?</b> &lt;i&gt;
[x](javascript:alert(3)) [y](data:text/html,<script>alert(4)</script>) ![z](https://evil.example/z.png)
<https://evil.example/"onmouseover="alert(5)> [good](https://example.org/a_b_c) <javascript:alert(6)>
https://example.org/q?a=1.

<iframe src="https://evil.example"></iframe>

```html" onload="alert(7)
</code></pre><script>alert(8)</script>
```

| <svg onload=alert(9)> | b |
|---|---|
| <style>*{display:none}</style> | [c](vbscript:x) |
"""


def test_hostile_text_stays_text(page: Any, fake: Any) -> None:
    fake.answers = [
        [{"reasoning_content": HOSTILE}, {"content": HOSTILE}, fake.call(0, "<img src=x onerror=alert(1)>", HOSTILE)]
    ]
    page.goto(fake.url)
    before = page.evaluate("document.querySelectorAll('img, script, iframe, style, b, i, object, embed, link').length")
    page.ask(HOSTILE)
    page.idle()
    page.locator(".call textarea").fill(HOSTILE)
    page.click("text=Send results")
    page.idle()
    page.reload()
    made = page.evaluate("document.querySelectorAll('img, script, iframe, style, b, i, object, embed, link').length")
    assert made == before + 3 * page.locator(".assistant").count()  # the dots of .waiting
    allowed = {"href", "class", "rel", "target", "tabindex", "start", "data-action", "type"}
    names = page.evaluate(
        "[...document.querySelectorAll('.md *')].flatMap((e) => e.closest('svg') ? [] : e.getAttributeNames())"
    )
    assert set(names) <= allowed
    links = page.evaluate("[...document.querySelectorAll('#turns a')].map((a) => [a.href, a.rel, a.target])")
    assert {link[0] for link in links} == {
        "https://evil.example/z.png", "https://example.org/a_b_c", "https://example.org/q?a=1",
        "https://evil.example/", "https://evil.example/%22onmouseover=%22alert(5)",
    }  # fmt: skip
    assert all(link[1:] == ["noopener noreferrer nofollow", "_blank"] for link in links)
    shown = page.inner_text(".assistant .md >> nth=0")
    for part in (
        '<img src=x onerror="alert(1)">',
        "[x](javascript:alert(3))",
        "<javascript:alert(6)>",
        "</code></pre>",
    ):
        assert part in shown
    assert page.inner_text(".user .bubble").strip() == HOSTILE.strip()


MARKDOWN = """# Title with `code`
Intro *em* **strong *both*** ~~gone~~ 2 * 3 snake_case_name and \\*stars\\*
second line

- one
  - nested **b**
    - deeper
- two

  still two
1. first
2. second
   ```py
   x = 1
   ```

> quote
> - in it

---
a | b | c
:-|:-:|-:
1 | `x` | [l](http://example.org/(p))

~~~
open *fence*
    kept

"""


def test_growing_text_looks_like_the_whole(page: Any, fake: Any) -> None:
    page.goto(fake.url)
    looks = """([text, size]) => {
        const root = document.createElement("div"), view = new MarkdownView(root);
        for (let end = Math.min(size, text.length); ; end = Math.min(end + size, text.length)) {
            view.update(text.slice(0, end));
            if (end === text.length) break;
        }
        for (const icon of root.querySelectorAll("button")) icon.remove();
        return root.innerHTML;
    }"""
    for source in (
        MARKDOWN,
        HOSTILE,
        "*" * 50 + "a" + "*" * 50,
        "a\n-",
        "```\n``\n",
        "> x\n\n1. a\n\n\n2. b\n- c\nlazy\n| a\n|-",
    ):
        whole = page.evaluate(looks, [source, 10_000])
        for size in (1, 2, 7):
            assert page.evaluate(looks, [source, size]) == whole
    html = page.evaluate(looks, [MARKDOWN, 10_000])
    for part in (
        '<h2 class="h1">Title with <code>code</code></h2>',
        "<em>em</em> <strong>strong <em>both</em></strong> <del>gone</del> 2 * 3 ",
        "</del> 2 * 3 snake_case_name and *stars*\nsecond line</p>",
        '<ul class="loose"><li><p>one</p><ul><li>nested <strong>b</strong><ul><li>deeper</li></ul></li></ul></li>',
        "<p>two</p><p>still two</p></li></ul><ol><li>first</li><li>second<figure",
        "<code>x = 1</code>", "<blockquote><p>quote</p><ul><li>in it</li></ul></blockquote><hr>",
        '<th class="center">b</th>', '<td class="right"><a href="http://example.org/(p)"',
        "<code>open *fence*\n    kept\n\n",
    ):  # fmt: skip
        assert part in html, part


@pytest.mark.parametrize(
    "piece", ["word ", "**b** `c` [d](http://e.f)\n", "- item *x*\n", "[", "*a ", "`" * 3 + "x\ny\n", "> ", "|a"]
)
def test_long_answers_stay_fast(page: Any, fake: Any, piece: str) -> None:
    """20,000 tokens, one a chunk: the page keeps up, and never blocks for long."""
    start = "```\n" if piece == "word " else ""
    fake.answers = [[{"content": start}, *({"content": piece} for _ in range(20_000)), fake.usage(20_000)]]
    page.goto(fake.url)
    page.evaluate("""() => {
        window.longest = 0;
        let last = performance.now();
        setInterval(() => {
            const now = performance.now();
            window.longest = Math.max(window.longest, now - last);
            last = now;
        }, 10);
    }""")
    page.ask("go")
    page.wait_for_selector("body:not(.running)", timeout=90_000)
    assert page.evaluate("chat.turns[1].content.length") == len(start) + 20_000 * len(piece)
    assert page.evaluate("longest") < 4000, "the page stood still"


def test_nesting_is_bounded(page: Any, fake: Any) -> None:
    page.goto(fake.url)
    depth = """(text) => {
        const root = document.createElement("div");
        new MarkdownView(root).update(text);
        let deepest = 0;
        for (const one of root.querySelectorAll("*")) {
            let depth = 0;
            for (let at = one; at !== root; at = at.parentElement) depth += 1;
            deepest = Math.max(deepest, depth);
        }
        return deepest;
    }"""
    lists = "\n".join("  " * i + "- x" for i in range(200))
    for text in (
        "*" * 500 + "a" + "*" * 500,
        "*a " * 500 + "a* " * 500,
        "> " * 500 + "x",
        lists,
        "_*" * 500 + "a" + "*_" * 500,
    ):
        assert page.evaluate(depth, text) < 80


def test_costly_updates_leave_the_page_its_time(page: Any, fake: Any) -> None:
    page.goto(fake.url)
    share = page.evaluate("""async () => {
        const turn = newAnswer(), scroll = follow;
        turn.content = "**b** `c` ".repeat(5000);
        chat.turns.push(turn);
        const view = addView(turn), update = view.update.bind(view);
        let busy = 0;
        const timed = (work) => () => { const start = performance.now(); work(); busy += performance.now() - start; };
        view.update = timed(update);
        window.follow = timed(scroll);  // where the browser lays the text out
        const begun = performance.now();
        while (performance.now() - begun < 2500) {
            turn.content += "**b** `c` ";
            view.schedule();
            await new Promise((go) => setTimeout(go, 4));
        }
        return busy / (performance.now() - begun);
    }""")
    assert 0.01 < share < 0.4  # a seventh, and noise
    same = page.evaluate("""() => {
        const root = document.createElement("div"), view = new MarkdownView(root);
        view.update("before\\n\\n```py\\none\\n");
        const node = root.querySelector("code").firstChild;
        view.update("before\\n\\n```py\\none\\ntwo");
        return [node === root.querySelector("code").firstChild, node.data];
    }""")
    assert same == [True, "one\ntwo"]
