"""The stage list: plain lines, estimates, the drawn list, and streams that go away."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from glm5.obs.progress import PipelineProgress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(stages: list[str], **rest: object) -> tuple[PipelineProgress, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    progress = PipelineProgress(stages, console=Console(file=out, width=40), clock=clock, **rest)  # type: ignore[arg-type]
    return progress, out, clock


def test_plain_lines_are_few_and_complete() -> None:
    progress, out, clock = plain(["tokenizer", "pretrain", "sft"], expected_seconds={"pretrain": 50, "sft": 50})
    with progress:
        progress.skip("tokenizer", "already done")
        progress.start("pretrain", 100)
        for step in range(100):
            clock.now += 0.25
            progress.advance(loss=4.0 - step / 50, lr=3e-4)
        progress.finish("pretrain", "loss 2.02 [held-out]")
        progress.start("sft")
        progress.finish("sft")
    assert out.getvalue().splitlines() == [
        "[1/3] tokenizer: already done",
        "[2/3] pretrain: started, 100 steps",
        "[2/3] pretrain: 40/100, 0:10 elapsed, 0:15 left, 0:40 for all, loss 3.22 lr 0.0003",
        "[2/3] pretrain: 80/100, 0:20 elapsed, 0:05 left, 0:30 for all, loss 2.42 lr 0.0003",
        "[2/3] pretrain: done in 0:25: loss 2.02 [held-out]",
        "[3/3] sft: started",
        "[3/3] sft: done in 0:00",
    ]


def test_estimates_follow_the_machine() -> None:
    progress, _, clock = plain(["a", "b", "c"], expected_seconds={"a": 10, "b": 20, "c": 30})
    assert progress.seconds_left() == 60
    progress.start("a", 4)
    assert progress.seconds_left() == 60
    clock.now += 10
    progress.advance(2, loss=1.0)  # half of `a` took all its time: this machine is half as fast
    assert (progress.stage_seconds_left(), progress.seconds_left()) == (10, 110)
    clock.now += 10
    progress.finish("a")
    assert progress.seconds_left() == 100
    progress.skip("b")
    assert progress.seconds_left() == 60
    progress.start("c")
    clock.now += 100
    assert progress.seconds_left() == 0


def test_without_weights_there_is_no_estimate_of_the_whole() -> None:
    progress, _, clock = plain(["a", "b"])
    progress.start("a", 10)
    clock.now += 5
    progress.advance(5, loss=1.0)
    assert (progress.stage_seconds_left(), progress.seconds_left()) == (5, None)


def test_steps_of_an_earlier_process_say_nothing_about_the_pace() -> None:
    progress, _, clock = plain(["a", "b"], expected_seconds={"a": 100, "b": 10})
    progress.start("a", 100)
    clock.now += 2  # reading the checkpoint
    progress.advance(90)
    assert progress.stage_seconds_left() == 98
    clock.now += 3
    progress.advance(1, loss=1.0)
    assert progress.stage_seconds_left() == 27  # 9 steps of 3 seconds, not 9 of 5/91
    assert progress.seconds_left() == 27 + 30  # 3 seconds where one was expected: three times as slow


def test_a_long_stage_prints_less_and_less_often() -> None:
    progress, out, clock = plain(["a"])
    progress.start("a", 2 * 86400)
    hours = []
    for step in range(2 * 86400):
        clock.now += 1
        progress.advance(loss=1.0)
        if step % 43200 == 43199:
            hours.append(len(out.getvalue().splitlines()))
    assert hours[0] < 250  # 4320 lines of ten seconds each
    assert hours[3] - hours[2] == 144  # half a day of five minutes each


def test_numbers_are_short_and_without_exponents() -> None:
    progress, out, clock = plain(["a"])
    progress.start("a", 10)
    clock.now += 10
    progress.advance(loss=2.34567, tokens_per_second=123456.7, lr=0.0003, tokens=7)
    assert out.getvalue().splitlines()[-1].endswith("loss 2.35 tok/s 123k lr 0.0003 tokens 7")
    clock.now += 10
    progress.advance(loss=1234.5, tokens_per_second=98765432.1, lr=-54321.0, tokens=10**10)
    assert out.getvalue().splitlines()[-1].endswith("loss 1234 tok/s 98.8M lr -54.3k tokens 10.0G")


def test_wrong_order_of_calls_is_refused() -> None:
    progress, _, _ = plain(["a", "b"])
    with pytest.raises(ValueError, match="no stage is running"):
        progress.advance()
    progress.start("a")
    with pytest.raises(ValueError, match="a has not finished"):
        progress.start("b")
    with pytest.raises(ValueError, match="b is not the running stage"):
        progress.finish("b")
    with pytest.raises(ValueError, match="differ"):
        plain(["a", "a"])


@pytest.mark.parametrize(("error", "word"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_an_exception_marks_the_running_stage_and_passes_on(error: type[BaseException], word: str) -> None:
    progress, out, clock = plain(["a"])
    with pytest.raises(error), progress:
        progress.start("a", 3)
        clock.now += 62
        raise error
    assert out.getvalue().splitlines()[-1] == f"[1/1] a: {word} after 1:02"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_shows_all_stages_at_once(encoding: str) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), force_terminal=True, width=100)
    clock = Clock()
    with PipelineProgress(["a", "b", "c"], {"a": 1, "b": 1, "c": 4}, console=console, clock=clock) as progress:
        progress.skip("a")
        progress.start("b", 10)
        clock.now += 3661
        progress.advance(5, reward=0.25)
        console.print(progress._table())
        progress.finish("b", "reward 0.25")
    console.file.flush()
    text = raw.getvalue().decode(encoding)
    assert "5/10  reward 0.25" in text and "1:01:01" in text
    assert ("✓" if encoding == "utf-8" else "+") in text
    assert "already done" in text


def test_text_that_the_stream_cannot_spell_is_escaped() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=100)
    with PipelineProgress(["a"], console=console) as progress:
        progress.skip("a", "é")
    console.file.flush()
    assert raw.getvalue() == b"[1/1] a: \\xe9\n"


RUN = """
import sys
from glm5.obs.progress import PipelineProgress
with PipelineProgress(["a", "b"], interval=0.0) as progress:
    progress.start("a", 3000)
    for _ in range(3000):
        progress.advance(loss=1.0)
    progress.finish("a", "good")
    progress.skip("b")
sys.exit(7)
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reader_that_goes_away_does_not_stop_the_run(terminal: bool) -> None:
    read, write = os.pipe()
    environment = {**os.environ, **({"FORCE_COLOR": "1", "TERM": "xterm"} if terminal else {})}
    run = subprocess.Popen([sys.executable, "-c", RUN], stdout=write, stderr=write, env=environment)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    assert run.wait(timeout=60) == 7


@pytest.mark.parametrize("terminal", [False, True])
def test_streams_closed_from_the_start(terminal: bool) -> None:
    environment = {**os.environ, **({"FORCE_COLOR": "1", "TERM": "xterm"} if terminal else {})}
    code = f"import os; os.close(1); os.close(2); os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {RUN!r}])"
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 7


def test_a_file_closed_by_the_program(tmp_path: os.PathLike[str]) -> None:
    out = io.StringIO()
    with PipelineProgress(["a"], console=Console(file=out)) as progress:
        out.close()
        progress.start("a")
        progress.finish("a")
