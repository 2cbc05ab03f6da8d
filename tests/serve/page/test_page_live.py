"""The chat page in a real browser against `glm5 serve`."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def live(
    model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of the small model with a key. Greedy answers never end: the tokens that end one weigh nothing."""
    folder = tmp_path_factory.mktemp("page") / "nano"
    endless = copy.deepcopy(model)
    with torch.no_grad():
        endless.lm_head.weight[list(tokenizer.stop_token_ids)] = 0
    endless.save_pretrained(folder)
    tokenizer.save(folder)
    options = ["--port", "0", "--api-key", "sesame", "--speculative", "1"]
    command = [sys.executable, "-m", "glm5", "serve", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "Ready on " in line)
            yield process, line.split()[-1]
        finally:
            process.kill()


def test_a_real_server(page: Any, live: tuple[subprocess.Popen[str], str]) -> None:
    process, url = live
    page.refused = 2  # without a key, and when nobody is there
    page.goto(url)
    assert page.inner_text("h1") == "nano"
    page.setting("max_tokens", "48")
    page.setting("seed", "5")
    page.setting("stop", "")
    page.ask("Hello")
    page.wait_for_selector("#settings[open]")
    page.keyboard.type("sesame")
    page.keyboard.press("Escape")
    page.click("#thinking-chip")
    page.click(".failure >> text=Retry")
    page.idle()
    answer, stats = page.evaluate("[chat.turns[1].content, chat.turns[1].stats]")
    assert answer and re.search(
        r"\b\d+ tokens · .* tokens/s · first after .* · prompt \d+.* · drafts \d+% accepted", stats
    )
    page.reload()
    assert page.evaluate("chat.turns[1].content") == answer
    page.click("[aria-label='Regenerate answer']")
    page.idle()
    assert page.evaluate("chat.turns[1].content") == answer  # the same seed
    assert page.inner_text(".last .stats").count("cached") <= 1

    def running() -> int:
        text = httpx.get(f"{url}/metrics", headers={"x-api-key": "sesame"}, trust_env=False).text
        return int(re.search(r"^glm5_samples_running (\d+)", text, re.M)[1])  # type: ignore[index]

    page.click("#thinking-chip")
    page.setting("temperature", "0")
    page.setting("max_tokens", "")
    page.ask("Never end")
    page.wait_for_selector(".last .thought")
    page.until(lambda: len(page.evaluate("chat.turns.at(-1).reasoning")) > 40)
    assert running() == 1 and page.evaluate("running !== null")
    page.keyboard.press("Escape")
    page.idle()
    page.until(lambda: running() == 0)
    assert page.inner_text(".last .stats").startswith("stopped")
    process.terminate()
    process.wait(60)
    page.ask("Still there?")
    page.wait_for_selector(
        ".last .failure p:text-is('The server cannot be reached. See whether it still runs, then try again.')"
    )
