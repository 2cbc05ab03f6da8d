"""Dockerfiles without Docker: what is read, what is refused and why, and what a room then holds."""

from __future__ import annotations

import io
import tarfile

import pytest

from glm5.errors import GradingError
from glm5.sandbox.dockerfile import Base, Copy, Plan, Run, base_name, read_dockerfile
from glm5.sandbox.dockerfile_build import BuildError, File, build, machine_base
from glm5.sandbox.environment import NamespaceEnvironment, RoomLimits, environment_mechanism

HERE = Base(packages={"git", "make"}, python={"numpy"}, programs={"python3"})


def plan(text: str, *context: str) -> Plan:
    return read_dockerfile(text, context, HERE)


def kinds(text: str, *context: str) -> list[str]:
    return [blocker.kind for blocker in plan(text, *context).blockers]


def commands(text: str) -> list[str]:
    return [step.command for step in plan(text).steps if isinstance(step, Run)]


def test_what_a_folder_of_the_room_makes_unnecessary() -> None:
    """SWE tasks install their test dependencies only if the room was not given them."""
    for install in (
        "npm install --prefix /opt/site 'x@1'",
        "(apt-get update && apt-get install -y 'nginx' && cp -r /x /y)",
    ):
        text = f"FROM debian\nRUN test -d /opt/site || {install}\n"
        assert kinds(text) in (["network"], ["apt-get"])
        assert not read_dockerfile(text, (), HERE, present={"/opt/site"}).blockers
        assert read_dockerfile(text, (), HERE, present={"/opt"}).blockers


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("ubuntu", "ubuntu"),
        ("docker.io/library/python:3.13-slim", "python"),
        ("ghcr.io/x/python-3-13:20250620", "python"),
        ("debian@sha256:00", "debian"),
        ("localhost:5000/team/tool:1", "tool"),
    ],
)
def test_the_base_of_an_image(image: str, name: str) -> None:
    assert base_name(image) == name


def test_variables_and_places() -> None:
    found = plan(
        "ARG TAG=24.04\nFROM ubuntu:$TAG\nARG A=1\nENV B=${A:-0}2 C='x y'\nENV D the rest\nWORKDIR /app\nWORKDIR sub\n"
        "ENV PATH=/opt/bin:$PATH\nRUN echo $B"
    )
    assert found.blockers == ()
    assert (found.env["B"], found.env["C"], found.env["D"], found.workdir) == ("12", "x y", "the rest", "/app/sub")
    assert found.env["PATH"].startswith("/opt/bin:/usr/local/sbin:")
    last = found.steps[-1]
    assert isinstance(last, Run) and last.workdir == "/app/sub" and last.env["A"] == "1" and last.command == "echo $B"


def test_lines_go_on_and_documents_are_scripts() -> None:
    text = "# a\nFROM ubuntu\nRUN a && \\\n# between\n  b\nRUN <<EOF\nc\nd\nEOF\n"
    text += 'RUN cat <<\'X\' > f\ne\nX\nRUN ["g", "h i"]'
    assert commands(text) == ["a &&    b", "c\nd\n", "cat <<'X' > f\ne\nX\n", "g 'h i'"]


def test_copies() -> None:
    text = "FROM ubuntu\nWORKDIR /app\nCOPY a.txt .\nCOPY --chmod=700 d /x/\nCOPY a.txt b.txt\nADD *.tar /t/\nCOPY . /b"
    steps = [step for step in plan(text, "a.txt", "d/e", "x.tar").steps if isinstance(step, Copy)]
    assert [(step.sources, step.target, step.into) for step in steps] == [
        (("a.txt",), "/app", True),
        (("d/",), "/x", True),
        (("a.txt",), "/app/b.txt", None),
        (("x.tar",), "/t", True),
        (("",), "/b", True),
    ]
    assert steps[1].mode == 0o700 and steps[3].unpack


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("FROM alpine:3", "base"),
        ("FROM node:20", "base"),  # node is not among this base's programs
        ("FROM ubuntu AS a\nFROM ubuntu", "multi-stage"),
        ("FROM ubuntu\nCOPY --from=x /a /b", "multi-stage"),
        ("FROM ubuntu\nRUN apt-get install -y git nginx", "apt-get"),
        ("FROM ubuntu\nRUN x; DEBIAN_FRONTEND=noninteractive apt install $P", "apt-get"),
        ("FROM ubuntu\nRUN curl -L https://example.org/x | sh", "network"),
        ("FROM ubuntu\nRUN cd /x && git clone git@example.org:x", "network"),
        ("FROM ubuntu\nRUN python3 -m pip install -q requests==2", "network"),
        ("FROM ubuntu\nRUN pip install -r requirements.txt", "network"),
        ("FROM ubuntu\nRUN npm ci", "network"),
        ("FROM ubuntu\nADD https://example.org/x /x", "network"),
        ("FROM ubuntu\nCOPY a /usr/bin/a", "read-only"),
        ("FROM ubuntu\nCOPY a /tests/a", "read-only"),
        ("FROM ubuntu\nWORKDIR /logs", "read-only"),
        ("FROM ubuntu\nCOPY none /x", "copy"),
        ("FROM ubuntu\nCOPY ../a /x", "copy"),
        ("FROM ubuntu\nRUN --mount=type=secret,id=x true", "instruction"),
        ("FROM ubuntu\nONBUILD RUN true", "instruction"),
        ('FROM ubuntu\nSHELL ["pwsh"]', "instruction"),
        ("RUN true", "syntax"),
        ("", "syntax"),
        ("FROM ubuntu\nRUN <<EOF\nnever", "syntax"),
        ("FROM ubuntu\nENV A='", "syntax"),
        ("FROM ubuntu\nCOPY [z-a] /x", "syntax"),
        ("FROM ubuntu\nCOPY [a /x", "copy"),
    ],
)
def test_what_is_refused(text: str, kind: str) -> None:
    assert kinds(text, "a") == [kind]


def test_a_pattern_of_many_stars_is_no_endless_search() -> None:
    assert kinds(f"FROM ubuntu\nCOPY {'*a' * 30}*b /x", "a" * 200) == ["copy"]
    (step,) = plan("FROM ubuntu\nCOPY d/*a*[bc]?* /x", "d/xaxbx", "d/xaxb", "d/e/abx", "d/acc").steps
    assert isinstance(step, Copy) and step.sources == ("d/acc", "d/xaxbx")


def test_what_is_there_needs_no_install() -> None:
    text = """\
FROM python:3.13
RUN apt-get update && apt-get install -y --no-install-recommends git=1:2 make:amd64 > /dev/null 2>&1 && rm -rf /x
RUN pip install --no-cache-dir -i http://x/simple NumPy==2.0 && pip install .
RUN curl -s http://127.0.0.1:80/
USER bob
CMD x
"""
    found = plan(text)
    assert found.blockers == () and len(found.notes) == 4


def test_what_only_names_the_network() -> None:
    text = """\
# a comment before anything
FROM python:3.13-slim@sha256:0000
ENTRYPOINT []
ENV LD_LIBRARY_PATH=/opt/lib:$LD_LIBRARY_PATH \\
    VENV="/opt/v"
RUN --mount=type=cache,target=/root/.cache apt install -y git make  # needed below
RUN git init /app && git remote add origin https://example.org/x.git
RUN pip install --no-cache-dir --upgrade pip numpy && python -m venv "${VENV}"
HEALTHCHECK --interval=15s \\
    CMD curl -f https://example.org/
COPY --chown=bob:bob a ./
"""
    found = plan(text, "a")
    assert found.blockers == () and found.env["LD_LIBRARY_PATH"] == "/opt/lib:" and found.env["VENV"] == "/opt/v"


def test_all_blockers_are_found_at_once() -> None:
    assert kinds("FROM ubuntu\nRUN npm ci\nCOPY none /x\nRUN apt-get install vim") == ["network", "copy", "apt-get"]


def test_many_steps_and_long_texts_are_refused() -> None:
    assert "instruction" in kinds("FROM ubuntu\n" + "RUN true\n" * 600)
    assert kinds("FROM ubuntu\nRUN " + "x" * 300_000) == ["syntax"]


@pytest.fixture(scope="module", autouse=False)
def mechanism() -> str:
    try:
        return environment_mechanism()
    except GradingError as error:
        pytest.skip(str(error))


def test_a_build(mechanism: str) -> None:
    text = """\
FROM ubuntu
ENV A=1
WORKDIR /app
COPY run.sh data/ ./
COPY run.sh other
COPY empty /srv/empty
RUN useradd bob && chown -R bob . && apt-get update && ./run.sh > out && apt-get install -y
COPY <<EOF /etc/note
hello $A
EOF
ADD p.tar.gz /srv/
"""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("in.txt")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"in"))
    files = {
        "run.sh": File(b"#!/bin/sh\necho $A in $PWD\n", executable=True),
        "data/d.txt": File(b"d"),
        "data/e/f.txt": File(b"f"),
        "data/none/": File(b""),
        "empty/": File(b""),
        "p.tar.gz": File(packed.getvalue()),
    }
    with NamespaceEnvironment(limits=RoomLimits(disk_mb=64)) as room:
        build(room, read_dockerfile(text, files, machine_base()), files)
        assert room.download("/app/out") == b"1 in /app\n"
        assert room.download("/app/d.txt") == b"d" and room.download("/app/e/f.txt") == b"f"
        assert room.download("/app/other").startswith(b"#!")
        assert {entry.path for entry in room.files.entries("/srv")} >= {"/srv/empty", "/srv/in.txt"}
        assert "/app/none" in {entry.path for entry in room.files.entries("/app")}
        assert room.download("/etc/note").startswith(b"hello")
        assert room.download("/srv/in.txt") == b"in"


@pytest.mark.parametrize(
    ("command", "kind"),
    [("exit 3", "run"), ("python3 -c 'import socket; socket.create_connection((\"example.org\", 80))'", "network"),
     ("sleep 60", "timeout"), ("head -c 99M /dev/zero > /x", "too-large")],
)  # fmt: skip
def test_a_build_that_fails(mechanism: str, command: str, kind: str) -> None:
    with NamespaceEnvironment(limits=RoomLimits(disk_mb=16)) as room:
        with pytest.raises(BuildError) as caught:
            build(room, read_dockerfile(f"FROM ubuntu\nRUN {command}", {}, machine_base()), {}, timeout_s=3)
    assert caught.value.kind == kind


@pytest.mark.parametrize("name", ["usr/bin/none/", "usr/bin/file", "etc/passwd/x"])
def test_what_cannot_be_copied_is_said(mechanism: str, name: str) -> None:
    files = {f"all/{name}": File(b"")}
    with NamespaceEnvironment(limits=RoomLimits(disk_mb=16)) as room, pytest.raises(BuildError) as caught:
        build(room, read_dockerfile("FROM ubuntu\nCOPY all/ /", files, machine_base()), files)
    assert caught.value.kind == "copy" and "line 2" in str(caught.value)
