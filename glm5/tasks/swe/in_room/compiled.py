"""Builds and runs tests of C, C++, Rust and Java inside a room; the frameworks that `suite.py` finds here. Standard
library only.

Every test program is started by this process, which reads its exit status itself. Next to a program's own tests there
is the test `FILE::program`, which passes if the program ends with status 0; a program that crashes, or ends before its
time, fails it whatever it printed. The code under test is linked into the test program: it can print the lines of any
report and exit with any status. What it cannot do is to change the build, which starts without any object file, or to
tell a twin run from the real one.

`spec["build"]` (see `languages/compiled.py`) says how to build: `compiler`, `flags`, `objects`, `libraries`, `style`.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import shutil
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from typing import Any

Outcome = tuple[list[str], str, float, str]  # titles, outcome, seconds, message
PROGRAM = "program"
SKIPPED = 77  # exit status, by the convention of automake
JOBS = "-j2"


def built(suite: Any, command: list[str], cwd: str = "", **environment: str) -> tuple[int, str]:
    """Run a step of the build; its exit status says nothing about tests."""
    code, printed, _ = suite.launch(command, cwd, **environment)
    suite.codes.pop()
    return code, printed.decode(errors="replace")


def stem(file: str) -> str:
    return os.path.splitext(os.path.basename(file))[0]


def finish(suite: Any) -> None:
    """One exit code for all programs: 1 if a test failed."""
    bad = any(event["outcome"] in ("failed", "error") for event in suite.events)
    suite.codes[:] = [int(bad)]


def run_program(suite: Any, file: str, command: list[str], cwd: str, style: str, **environment: str) -> None:
    """Run one test program and report its tests and its exit status."""
    started = time.monotonic()
    code, printed, _ = suite.launch(command, cwd, **environment)
    seconds, said = time.monotonic() - started, printed.decode(errors="replace")
    failures = []
    for titles, outcome, taken, message in STYLES[style](said):
        if outcome == "failed":
            failures.append(message)
        suite.add(file, titles, outcome, taken, located(suite, message) if outcome == "failed" else "")
    outcome = "passed" if code == 0 else "skipped" if code == SKIPPED and not failures else "failed"
    if style == "libtest" and bool(code) == bool(failures):
        return  # its report is complete: every test has a line of its own
    told = "" if failures else ended(code) + "\n" + said.strip()[-600:]
    suite.add(file, [PROGRAM], outcome, seconds, located(suite, told) if outcome == "failed" else "")


def run_each(suite: Any, file: str, program: str, flag: str, cwd: str) -> None:
    """Run every test that a program lists in a process of its own; the exit status tells its outcome."""
    _, listed = built(suite, [program, flag], cwd)
    for name in re.findall(r"^([\w./-]+)", listed, re.M):
        started = time.monotonic()
        code, printed, _ = suite.launch([program, name], cwd)
        told = ended(code) + "\n" + printed.decode(errors="replace").strip()[-600:]
        outcome = "passed" if code == 0 else "failed"
        suite.add(file, name.split("/"), outcome, time.monotonic() - started, located(suite, told) if code else "")


def canary(suite: Any) -> str:
    """The canary's file: the last one, if there is one. It has no helpers and lists no tests."""
    return suite.files[-1] if suite.spec["select"] is not None else ""


def located(suite: Any, message: str) -> str:
    """The failing statement of a test file, if the message names its place, an empty line, and the message without
    paths of the room."""
    shown = re.sub(re.escape(suite.root) + "/", "", message).strip()
    found = re.search(r"([\w./-]+\.\w+)[:(](\d+)", shown)
    if not found or not os.path.isfile(os.path.join(suite.root, found[1])):
        return shown
    with open(os.path.join(suite.root, found[1]), encoding="utf-8", errors="replace") as stream:
        lines = stream.read().split("\n")
    start = int(found[2]) - 1
    for end in range(start + 1, min(start + 9, len(lines) + 1)):
        told = "\n".join(lines[start:end])
        if told.count("(") <= told.count(")") and told.strip():
            return told + "\n\n" + shown
    return shown


def ended(code: int) -> str:
    return (
        f"The test program was ended by signal {-code}." if code < 0 else f"The test program ended with status {code}."
    )


def unity(said: str) -> Iterator[Outcome]:
    """Lines `FILE:LINE:NAME:PASS`, of Unity."""
    names = {"PASS": "passed", "FAIL": "failed", "IGNORE": "skipped"}
    for found in re.finditer(r"^(.*?:\d+):(\w+):(PASS|FAIL|IGNORE)(?::\s*(.*))?$", said, re.M):
        yield [found[2]], names[found[3]], 0.0, f"{found[1]}: {found[4] or ''}"


def tap(said: str) -> Iterator[Outcome]:
    """Test Anything Protocol; tests without a title are left out, for the exit status tells of them."""
    for found in re.finditer(r"^(not )?ok\b *(\d*)(?: *-)? *(.*?)( *# *(?:SKIP|TODO)\b.*)?$", said, re.M | re.I):
        if found[3]:
            outcome = "skipped" if found[4] else "failed" if found[1] else "passed"
            yield [found[3]], outcome, 0.0, found[3]


def marks(said: str) -> Iterator[Outcome]:
    """Lines `[pass] TITLE`, `[ OK ] TITLE`, `PASS: TITLE`, `FAIL: TITLE (at FILE:LINE)` and `Testing TITLE: OK`."""
    lines = said.split("\n")
    for number, line in enumerate(lines):
        if found := re.match(r"\[ ?(pass|fail|OK|FAIL) ?\] ?(.*?)(?: \[.*)?$|(PASS|FAIL): (\w+)", line):
            passed = (found[1] or found[3]).lower() in ("pass", "ok")
            before = "" if passed else "\n".join(lines[max(0, number - 2) : number])
            yield [found[2] or found[4]], "passed" if passed else "failed", 0.0, before + "\n" + line
        elif found := re.match(r"Testing ([\w/]+): (OK|FAILED)$", line):
            told = "\n".join(lines[number : number + 8])
            yield found[1].split("/"), "passed" if found[2] == "OK" else "failed", 0.0, told


def googletest(said: str) -> Iterator[Outcome]:
    """Lines `[ RUN ] SUITE.NAME` and `[ OK ] SUITE.NAME (1 ms)` of GoogleTest; the values of a test with parameters are
    further tests of its name."""
    ended = r"^\[ RUN +\] (\S+)\n(.*?)\[ +(OK|FAILED|SKIPPED) +\] \1(?:, where [^\n]*)? \((\d+) ms\)$"
    for found in re.finditer(ended, said, re.M | re.S):
        suite, _, name = found[1].partition(".")
        outcome = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[found[3]]
        yield [suite, name.split("/")[0]], outcome, int(found[4]) / 1000, found[2].strip()


def libtest(said: str) -> Iterator[Outcome]:
    """JSON lines of Rust's test programs."""
    for line in said.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("type") == "test" and row.get("event") in ("ok", "failed", "ignored"):
            outcome = {"ok": "passed", "failed": "failed", "ignored": "skipped"}[row["event"]]
            message = re.sub(r"\nnote: run with .*", "", str(row.get("stdout", "")))
            message = re.sub(r"(?m)^thread '.*?' panicked at ", "panicked at ", message)
            yield str(row["name"]).split("::"), outcome, float(row.get("exec_time", 0.0)), message


def both(*styles: Callable[[str], Iterator[Outcome]]) -> Callable[[str], Iterator[Outcome]]:
    """All lines that one of the styles knows."""
    return lambda said: (outcome for style in styles for outcome in style(said))


STYLES = {"unity": unity, "tap": tap, "libtest": libtest, "exit": unity, "marks": both(unity, marks),
          "gtest": both(unity, googletest)}  # fmt: skip


def caching(suite: Any) -> dict[str, str]:
    """Variables of ccache, if the site has a folder of this name: objects of the fixed state by the hash of their
    preprocessed source and flags, so that it cannot hide a change. A folder in /tmp is one to fill."""
    cache = next((folder for folder in suite.spec["site"] if os.path.basename(folder) == "ccache"), "")
    if not cache or not os.path.exists("/usr/bin/ccache"):
        return {}
    if not cache.startswith("/tmp/ccache"):  # ccache fails on a read-only folder, whatever it is told
        cache = shutil.copytree(cache, os.path.join(suite.scratch, "objects"))
    own = os.path.join(suite.scratch, "ccache")
    return {"CCACHE_DIR": own, "CCACHE_REMOTE_STORAGE": f"file:{cache}", "CCACHE_NODIRECT": "1"}


def run_cc(suite: Any) -> None:
    """C and C++ by a makefile of our own, outside of the repository: every test file is a program, linked with the
    objects of `build["objects"]` (patterns of source files)."""
    build, out = suite.spec["build"], os.path.join(suite.scratch, "build")
    os.makedirs(out)
    variables = caching(suite)
    if build.get("before"):
        built(suite, ["/bin/sh", "-c", build["before"]])
    sources = [p for pattern in build["objects"] for p in sorted(glob.glob(os.path.join(suite.root, pattern)))]
    objects = {os.path.join(out, os.path.relpath(p, suite.root).replace("/", "_") + ".o"): p for p in sources}
    compiler = ("ccache " if variables else "") + build["compiler"]
    compile_ = f"cd {shlex.quote(suite.root)} && {compiler} {build['flags']}"
    helpers = [p for pattern in build.get("helpers", []) for p in sorted(glob.glob(os.path.join(suite.root, pattern)))]
    helping = {os.path.join(out, f"helper{n}.o"): p for n, p in enumerate(helpers)}
    rules = [f"{o}: {p}\n\t{compile_} -c {p} -o {o}" for o, p in {**objects, **helping}.items()]
    library = os.path.join(out, "objects.a")  # an archive: a test file may include a source file's text itself
    rules.append(f"{library}: {' '.join(objects)}\n\tar rcs {library} {' '.join(objects)}")
    programs = {}
    for file in suite.files:
        path = os.path.join(suite.root, file)
        name = os.path.join(out, file.replace("/", "_"))
        programs[file] = name + ".exe"
        rules.append(f"{name}.main: {path}\n\t{compile_} -c {path} -o {name}.main")
        more = "" if file == canary(suite) else " ".join(helping)
        link = f"{build['compiler']} {name}.main {more} {library} {build.get('libraries', '')} -o {name}.exe"
        rules.append(f"{name}.exe: {name}.main {more} {library}\n\t{link}")
    makefile = os.path.join(out, "Makefile")
    with open(makefile, "w", encoding="utf-8") as stream:
        stream.write("\n".join([f"all: {' '.join(programs.values())}", *rules]) + "\n")
    _, printed = built(suite, ["make", "-r", "-k", JOBS, "-s", "-f", makefile, "all"], **variables)
    for file, program in programs.items():
        if not os.path.exists(program):
            suite.broken(file, printed)
            continue
        folder = os.path.join(suite.root, build.get("cwd", os.path.dirname(file)))
        if build.get("list") and file != canary(suite):
            run_each(suite, file, program, build["list"], folder)
        else:
            run_program(suite, file, [program, *suite.spec["args"]], folder, build["style"])
    finish(suite)


def run_cargo(suite: Any) -> None:
    """Rust: cargo builds the integration tests `tests/NAME.rs` without network; this process starts them. The JSON form
    of libtest is unstable: RUSTC_BOOTSTRAP opens it, for the test programs only."""
    if os.path.lexists("/.cargo"):
        suite.broken(suite.files[0], "/.cargo would change how cargo builds")
        finish(suite)
        return
    target = os.path.join(suite.scratch, "target")
    names = [part for file in suite.files for part in ("--test", stem(file))]
    options = ["--offline", "--keep-going", "--message-format=json"]  # a file that does not compile is broken alone
    command = ["cargo", "build", *options, *suite.spec["args"], *names]
    home = os.path.join(suite.scratch, "cargo")
    os.makedirs(home)
    registry = '[source.crates-io]\nreplace-with = "debian"\n[source.debian]\ndirectory = "/usr/share/cargo/registry"\n'
    with open(os.path.join(home, "config.toml"), "w", encoding="utf-8") as stream:
        stream.write(registry)
    _, printed = built(suite, command, CARGO_HOME=home, CARGO_TARGET_DIR=target, CARGO_INCREMENTAL="0",
                       RUSTFLAGS="-Cdebuginfo=0 --cap-lints=allow")  # fmt: skip
    programs: dict[str, str] = {}
    errors = []
    for line in printed.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            if line.strip():
                errors.append(line)
            continue
        if not isinstance(row, dict):
            continue
        if row.get("reason") == "compiler-artifact" and row.get("executable") and "test" in row["target"]["kind"]:
            programs[os.path.relpath(row["target"]["src_path"], suite.root)] = row["executable"]
        elif row.get("reason") == "compiler-message" and row["message"].get("level") == "error":
            errors.append(row["message"].get("rendered") or "")
    report = ["-Zunstable-options", "--format=json", "--report-time", "--test-threads=2"]
    for file in suite.files:
        if file not in programs:
            suite.broken(file, "\n".join(errors))
            continue
        run_program(suite, file, [programs[file], *report], suite.root, "libtest", RUSTC_BOOTSTRAP="1",
                    CARGO_MANIFEST_DIR=suite.root, RUST_BACKTRACE="0")  # fmt: skip
    finish(suite)


def run_junit(suite: Any) -> None:
    """Java: `javac` and the console of JUnit's platform, both with the libraries of Debian. The report is written by
    the virtual machine that runs the code under test. Sources that no test file needs are not compiled, unless
    `build["whole"]` asks for them."""
    build, out = suite.spec["build"], os.path.join(suite.scratch, "classes")
    os.makedirs(out)
    jars = ":".join(sorted(p for pattern in build["jars"] for p in glob.glob("/usr/share/java/" + pattern)))
    flags = ["-nowarn", "-proc:none", "-encoding", "UTF-8", "-g", "-implicit:class", "-J-XX:TieredStopAtLevel=1",
             "-J-Xshare:auto", "-J-XX:+UseSerialGC", "-Xmaxerrs", "1000"]  # fmt: skip
    stubs = os.path.join(suite.scratch, "stubs")
    for name, text in build.get("stubs", {}).items():  # sources that stand for a library
        os.makedirs(os.path.dirname(os.path.join(stubs, name)), exist_ok=True)
        with open(os.path.join(stubs, name), "w", encoding="utf-8") as stream:
            stream.write(text)
    folders = [os.path.join(suite.root, folder) for folder in (*build["helpers"], *build["sources"])]
    path = ":".join([*folders, stubs])
    whole = [p for folder in build["sources"] for p in _java(os.path.join(suite.root, folder))]
    chosen = {os.path.join(suite.root, file): file for file in suite.files}
    listed = os.path.join(suite.scratch, "sources")
    while chosen:  # without the test files that do not compile, until the others do
        with open(listed, "w", encoding="utf-8") as stream:
            stream.write("\n".join(dict.fromkeys([*(whole if build.get("whole") else []), *chosen])))
        code, printed = built(suite, ["javac", *flags, "-sourcepath", path, "-d", out, "-cp", jars, "@" + listed])
        if code == 0:
            break
        wrong = set(re.findall(r"^(/.*\.java):\d+: error: ", printed, re.M)) & chosen.keys() or set(chosen)
        for file in sorted(wrong):
            suite.broken(chosen.pop(file), printed)
    if not chosen:
        finish(suite)
        return
    resources = [os.path.join(suite.root, folder) for folder in build["resources"]]
    classes = {_class(file, build["helpers"]): file for file in chosen.values()}
    reports = os.path.join(suite.scratch, "reports")
    command = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Duser.timezone=UTC",
               "-cp", ":".join([out, *resources, jars]), *suite.spec["args"],
               "org.junit.platform.console.ConsoleLauncher", "--disable-banner", "--details=none",
               f"--reports-dir={reports}", *(f"--select-class={name}" for name in classes)]  # fmt: skip
    code, said, _ = suite.launch(command, suite.root)
    found = failed = False
    for report in sorted(glob.glob(os.path.join(reports, "*.xml"))):
        if os.path.islink(report):
            continue
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            owner = case.get("classname", "").split("$")[0]
            if owner not in classes:
                continue
            found = True
            bad = next((part for part in case if part.tag in ("failure", "error")), None)
            failed = failed or bad is not None
            outcome = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
            name = re.sub(r"\(\)$", "", case.get("name", ""))
            message = _java_message(suite, classes[owner], (bad.text or "")) if bad is not None else ""
            suite.add(classes[owner], [*case.get("classname", "").split("$")[1:], name], outcome,
                      float(case.get("time") or 0), message)  # fmt: skip
    if not found or code not in (0, 1):
        suite.broken(suite.files[0], said.decode(errors="replace"))
    finish(suite)
    if code in (0, 1) and (code != 0) != failed:
        suite.codes.append(-1)  # the report contradicts the exit status


def _java(folder: str) -> list[str]:
    names = glob.glob(os.path.join(folder, "**", "*.java"), recursive=True)
    return sorted(name for name in names if os.path.basename(name) not in ("module-info.java", "package-info.java"))


def _class(file: str, folders: list[str]) -> str:
    owner = next((folder for folder in folders if file.startswith(folder + "/")), "")
    return file[len(owner) + 1 : -len(".java")].replace("/", ".")


def _java_message(suite: Any, file: str, trace: str) -> str:
    """The failing statement, if the stack trace has a line of the test file, and the exception."""
    exception = re.split(r"\n\s*at ", trace)[0].strip()
    found = re.search(re.escape(os.path.basename(file)) + r":(\d+)\)", trace)
    if not found:
        return exception
    with open(os.path.join(suite.root, file), encoding="utf-8", errors="replace") as stream:
        lines = stream.read().split("\n")
    start = int(found[1]) - 1
    for end in range(start + 1, min(start + 9, len(lines) + 1)):
        if "\n".join(lines[start:end]).rstrip().endswith((";", "{", "}")):
            return "\n".join(lines[start:end]) + "\n\n" + exception
    return exception


FRAMEWORKS = {"cc": run_cc, "cargo": run_cargo, "junit": run_junit}
