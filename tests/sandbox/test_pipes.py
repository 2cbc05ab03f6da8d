"""Programs of a room that are talked to in lines."""

from __future__ import annotations

import gc
import os

import pytest

from glm5.errors import GradingError
from glm5.sandbox import room_pipes
from glm5.sandbox.container import open_environment
from glm5.sandbox.room import interpreter
from glm5.sandbox.room_pipes import Pipes
from tests.rooms import needs_rooms

pytestmark = needs_rooms
ECHO = "import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1], flush=True)"


def test_lines_go_in_and_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open_environment() as room:
        with Pipes(room, [interpreter(), "-c", ECHO]) as echo, Pipes(room, ["/bin/cat"]) as cat:
            echo.write(b"abc", 20)
            cat.write(b"x" * 300_000, 20)  # more than a pipe holds: cat writes it back meanwhile
            assert echo.read(20) == b"cba" and cat.read(20) == b"x" * 300_000
            with pytest.raises(GradingError, match="did not answer within"):
                echo.read(0.2)
            echo.write(b"de", 20)
            assert echo.read(20) == b"ed"  # it goes on after that
            monkeypatch.setattr(room_pipes, "MOST_LINE", 1000)
            with pytest.raises(GradingError, match="said more than"):
                cat.write(b"y" * 200_000, 20)
                cat.read(20)
        assert b"cat" not in room.exec(["/bin/ps", "-A"]).stdout  # what is closed has ended
        with Pipes(room, [interpreter(), "-c", "print(1)"]) as one:
            assert one.read(20) == b"1"
            with pytest.raises(GradingError, match="has ended"):
                one.read(20)
        with pytest.raises(GradingError, match="cannot be started"):
            Pipes(room, ["/no/such/program"])
        with Pipes(room, ["/bin/sleep", "60"]) as deaf, pytest.raises(GradingError, match="does not read"):
            deaf.write(b"z" * 1_000_000, 0.3)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_program_ends_with_the_object_that_talks_to_it() -> None:
    def running() -> bool:
        return b"sleep" in room.exec(["/bin/ps", "-A"]).stdout

    with open_environment() as room:
        pipes = Pipes(room, ["/bin/sleep", "60"])
        assert running()
        del pipes
        gc.collect()
        assert not running()
        left = Pipes(room, ["/bin/sleep", "60"])
        with room.verifier() as judge:
            slow = Pipes(judge, ["/bin/sleep", "60"])
            left.close()  # its session was of the room before, and may be another's now
            assert running()
            slow.close()
            assert not running()
