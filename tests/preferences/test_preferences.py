"""Pairs, votes, export and agreement; the requests of the page; the verb."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from glm5.cli import app
from glm5.data.sft import read_conversations
from glm5.errors import DataError, UsageError
from glm5.preferences.agreement import cohen_kappa, krippendorff_alpha, pairwise_kappas
from glm5.preferences.app import bind_local, create_app, page_text
from glm5.preferences.report import agreement_report
from glm5.preferences.rows import Pair, read_anchors, read_pairs, read_preferences
from glm5.preferences.store import CONSENT_HASH, PreferenceStore, swaps
from tests.pages import Served


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------------- agreement


def test_cohens_kappa() -> None:
    """The worked example of the English Wikipedia ("Cohen's kappa"): 20 and 15 agree, 5 and 10 do not; kappa 0.4."""
    first = ["yes"] * 25 + ["no"] * 25
    second = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    assert cohen_kappa(first, second) == pytest.approx(0.4)
    assert (
        cohen_kappa(first, first) == 1.0 and cohen_kappa(["a"] * 3, ["a"] * 3) is None and cohen_kappa([], []) is None
    )
    with pytest.raises(ValueError):
        cohen_kappa([1], [])


def test_krippendorffs_alpha() -> None:
    """The reliability data of Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), part C: 0.743."""
    table = ("1 2 3 3 2 1 4 1 2 . . .", "1 2 3 3 2 2 4 1 2 5 . 3", ". 3 3 3 2 3 4 2 2 5 1 .", "1 2 3 3 2 4 4 1 2 5 1 .")
    rows = [row.split() for row in table]
    votes = {unit: {f"r{i}": row[unit] for i, row in enumerate(rows) if row[unit] != "."} for unit in range(12)}
    assert krippendorff_alpha(votes) == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha({0: {"a": 1}, 1: {"a": 2}}) is None and krippendorff_alpha({}) is None
    assert krippendorff_alpha({0: {"a": 1, "b": 1}, 1: {"a": 1, "b": 1}}) is None
    assert krippendorff_alpha({0: {"a": 1, "b": 1}, 1: {"a": 2, "b": 2}}) == 1.0
    assert pairwise_kappas({0: {"a": 1, "b": 1}, 1: {"a": 2, "b": 2}, 2: {"b": 1}}) == {("a", "b"): (1.0, 2)}


def test_every_two_raters_have_a_kappa_whatever_their_names() -> None:
    votes = {i: {"A / B": 1, "C": 1, "A": 1, "B / C": 2} for i in range(6)} | {
        9: {"A / B": 2, "C": 2, "A": 2, "B / C": 1}
    }
    found = pairwise_kappas(votes)
    assert len(found) == 6 and found["A / B", "C"] == (1.0, 7)
    kappa = found["A", "B / C"][0]
    assert kappa is not None and kappa < 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=30))
def test_alpha_of_two_raters_is_near_kappa_and_at_most_one(pairs: list[tuple[int, int]]) -> None:
    alpha = krippendorff_alpha({i: {"a": a, "b": b} for i, (a, b) in enumerate(pairs)})
    assert alpha is None or (alpha <= 1.0 and (alpha == 1.0) == all(a == b for a, b in pairs))


# --------------------------------------------------------------------------------------------------------- files


def test_pairs_of_files_and_folders(tmp_path: Path) -> None:
    row = {"prompt": "p", "answers": ["a", "b"], "class": "x"}
    write(
        tmp_path / "1.jsonl",
        row,
        "",
        {"prompt": "p", "answers": ["b", "a"]},
        {"prompt": "q", "chosen": "a", "rejected": "c"},
    )
    write(tmp_path / "2.jsonl", row)
    found = read_pairs(tmp_path)
    assert found == [Pair("p", "a", "b", "x"), Pair("q", "a", "c")] == read_pairs(tmp_path / "1.jsonl")
    assert len({pair.id for pair in found}) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"prompt": "p"}', r'"answers\[0\]" must be a text'),
        ('{"prompt": "p", "answers": "ab"}', "list of two texts"),
        ('{"prompt": "p", "answers": ["a"]}', "list of two texts"),
        ('{"prompt": "p", "answers": ["a", 1]}', r'"answers\[1\]" must be'),
        ('{"prompt": " ", "answers": ["a", "b"]}', '"prompt" must be'),
        ('{"prompt": "p", "answers": ["a", "a"]}', "equal"),
        ('{"prompt": "p", "answers": ["\\ud800", "a"]}', "surrogate"),
        ('{"prompt": "p", "answers": ["a", "b"], "class": 3}', '"class" must be'),
        ("[" * 100_000, "nested too deeply"),
        (b'{"prompt": "caf\x90"}', "not UTF-8.$"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str | bytes, said: str) -> None:
    path = write(tmp_path / "pairs.jsonl", {"prompt": "p", "answers": ["a", "b"]})
    path.write_bytes(path.read_bytes() + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(DataError, match=rf"pairs.jsonl:2.*{said}"):
        read_pairs(path)


@pytest.mark.parametrize(("read", "what"), [(read_pairs, "pairs"), (read_preferences, "votes")])
def test_missing_files_are_called_what_they_are(tmp_path: Path, read: Callable[[Path], Any], what: str) -> None:
    for source in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(DataError, match=f"give a JSONL file of {what}"):
            read(source)


def test_votes_become_preferences(tmp_path: Path) -> None:
    rows = [("p", "a", "b", False)] * 2 + [("p", "b", "a", False), ("q", "a", "b", False), ("q", "b", "a", False),
            ("r", "a", "b", True), ("s", "a", "b", False), ("s", "a", "b", True)]  # fmt: skip
    made = [{"prompt": p, "chosen": c, "rejected": r, "tie": t, "rater": "x"} for p, c, r, t in rows]
    found = {one.prompt: one for one in read_preferences(write(tmp_path / "v.jsonl", *made))}
    assert set(found) == {"p", "s"} and (found["p"].better, found["p"].worse) == ("a", "b")
    assert found["p"].strength == pytest.approx(1 / 3) and found["s"].strength == 0.5
    with pytest.raises(DataError, match="no preference"):
        read_preferences(write(tmp_path / "t.jsonl", made[5]))
    with pytest.raises(DataError, match="true or false"):
        read_preferences(write(tmp_path / "u.jsonl", made[0] | {"tie": "no"}))


def test_anchors_are_conversations_that_sft_reads_too(tmp_path: Path) -> None:
    def talk(*turns: tuple[str, str]) -> dict[str, Any]:
        return {
            "messages": [{"role": role, "content": text} for role, text in turns],
            "author": "Ada",
            "license": "CC0",
        }

    path = write(
        tmp_path / "anchors.jsonl",
        talk(("user", "p"), ("assistant", "one")),
        talk(("system", "s"), ("user", "x"), ("assistant", "y"), ("user", "p"), ("assistant", "two")),
        talk(("user", "p"), ("assistant", "one")),
    )
    assert read_anchors([path]) == {"p": ["one", "two"]}
    assert len(list(read_conversations(path))) == 3
    with pytest.raises(DataError, match=r"a\.jsonl:1.*needs a user message"):
        read_anchors([write(tmp_path / "a.jsonl", talk(("assistant", "one")))])


# --------------------------------------------------------------------------------------------------------- store


def test_votes_are_kept_changed_and_forgotten(store: PreferenceStore) -> None:
    store.agree("Ada", CONSENT_HASH)
    order = store.order("Ada")
    assert len(order) == 4 and store.next_pair("Ada") == order[0]
    assert len({tuple(store.order(f"rater {i}")) for i in range(20)}) > 10
    for pair, side in zip(order, ("left", "right", "tie", "skip")):
        store.vote("Ada", pair, side, "why", 1.5)
    assert store.next_pair("Ada") is None and store.progress("Ada") == {"pairs": 4, "done": 4, "skipped": 1}
    assert [store.card("Ada", pair).choice for pair in order] == ["left", "right", "tie", "skip"]
    assert store.previous_pair("Ada", None) == order[3] and store.previous_pair("Ada", order[0]) is None
    store.unskip("Ada")
    assert store.next_pair("Ada") == order[3]
    store.vote("Ada", order[0], "right")
    card = store.card("Ada", order[0])
    assert card.choice == "right" and card.why == ""
    assert store.votes()[order[0]]["Ada"] == ("first" if swaps("Ada", order[0]) else "second")
    with PreferenceStore(store.path) as other:  # another process, at the same time
        assert other.card("Ada", order[1]).choice == "right"
    assert store.forget("Ada") == 3 and not store.agreed("Ada") and store.votes() == {}


def test_only_the_pairs_of_the_last_start_are_asked(tmp_path: Path) -> None:
    """Also in the order and with the classes of the last start; votes on the others come back with their pairs."""
    first = [Pair(name, "a", "b", "x") for name in "pqr"]
    later = [Pair("r", "a", "b", "y"), Pair("p", "a", "b, edited", "x"), first[1]]
    path, out = tmp_path / "votes.sqlite", tmp_path / "votes.jsonl"
    with PreferenceStore(path) as store:
        assert store.add_pairs(first) == 3 and (store.pairs_left_out(), store.votes_left_out()) == (0, 0)
        store.agree("Ada", CONSENT_HASH)
        for pair in first:
            store.vote("Ada", pair.id, "tie")
    with PreferenceStore(path) as store:
        assert store.add_pairs(later) == 1 and (store.pairs_left_out(), store.votes_left_out()) == (1, 1)
        assert store.next_pair("Ada") == later[1].id and sorted(store.order("Ada")) == sorted(p.id for p in later)
        assert store.progress("Ada") == {"pairs": 3, "done": 2, "skipped": 0}
        assert set(store.votes()) == {first[1].id, first[2].id} and store.export(out) == 2
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row["prompt"], row["class"]) for row in rows] == [("r", "y"), ("q", "x")]
        with PreferenceStore(path) as other:
            assert other.add_pairs(first) == 0 and len(other.votes()) == 3


def test_adding_pairs_takes_steps_in_proportion(tmp_path: Path) -> None:
    """Of SQLite's machine: a scan of the table for each pair would make them 16 times as many for 4 times the pairs."""

    def steps(count: int) -> int:
        calls = list[int]()
        with PreferenceStore(tmp_path / f"{count}.sqlite") as store:
            store._db.set_progress_handler(lambda: calls.append(1), 20)
            store.add_pairs([Pair(str(i), "a", "b") for i in range(count)])
        return len(calls)

    assert 0 < steps(800) < 6 * steps(200)


def test_sides_are_drawn_for_each_rater(store: PreferenceStore) -> None:
    shown = {swaps(f"rater {i}", pair) for i in range(20) for pair in store.order("Ada")[:1]}
    assert shown == {True, False}


@pytest.mark.parametrize(
    ("rater", "pair", "side", "why", "said"),
    [
        ("Ben", None, "left", "", "accept the text"),
        ("Ada", "no such", "left", "", "no such pair"),
        ("Ada", None, "up", "", "left, right, tie or skip"),
        ("Ada", None, "first", "", "left, right, tie or skip"),
        ("Ada", None, "left", "x" * 4001, "at most"),
    ],
)
def test_bad_votes_are_refused(
    store: PreferenceStore, rater: str, pair: str | None, side: str, why: str, said: str
) -> None:
    store.agree("Ada", CONSENT_HASH)
    with pytest.raises(UsageError, match=said):
        store.vote(rater, pair or store.order("Ada")[0], side, why)
    assert store.votes() == {}


def test_consent_is_to_the_present_text(store: PreferenceStore) -> None:
    with pytest.raises(UsageError, match="has changed"):
        store.agree("Ada", "older")
    for name in ("", " ", "x" * 61, "a\nb", 3):
        with pytest.raises(UsageError, match="1 to 60"):
            store.agree(name, CONSENT_HASH)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", ["ann", " ANN", "Ann "])
def test_a_rater_is_known_by_any_form_of_the_name(store: PreferenceStore, other: str) -> None:
    store.agree("Ann", CONSENT_HASH)
    store.agree("Ben", CONSENT_HASH)
    assert store.rater(other) == "Ann"  # as first written
    store.agree(other, CONSENT_HASH)
    store.vote(store.rater(other), store.order("Ann")[0], "left")
    assert {name for given in store.votes().values() for name in given} == {"Ann"}
    assert store.rater("Anna") == "Anna" and store.forget(store.rater(other)) == 1


def test_unicode_forms_are_one_rater(store: PreferenceStore) -> None:
    store.agree("Zo\u00eb", CONSENT_HASH)
    assert store.rater("zoe\u0308") == "Zo\u00eb" == store.rater("Zoe\u0308") and store.rater("Zoe") == "Zoe"


def test_other_files_are_no_store(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE x (y)")
    (tmp_path / "text.sqlite").write_text("some text that is longer than the header of a database file would be " * 3)
    for name in ("other", "text"):
        with pytest.raises(DataError, match="not a file of preferences"):
            PreferenceStore(tmp_path / f"{name}.sqlite")


def test_export_and_agreement(store: PreferenceStore, tmp_path: Path) -> None:
    good = {pair: "left" if store.card("Ada", pair).left.startswith("Good") else "right" for pair in store.order("Ada")}
    for rater in ("Ada", "Ben"):
        store.agree(rater, CONSENT_HASH)
        for pair in store.order(rater)[: 4 if rater == "Ada" else 3]:
            best = "left" if store.card(rater, pair).left.startswith("Good") else "right"
            store.vote(rater, pair, best, "clear")
    assert store.export(tmp_path / "out.jsonl") == 7
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert all(
        row["chosen"].startswith("Good") and row["rejected"].startswith("Bad") and row["why"] == "clear" for row in rows
    )
    assert {row["left"] for row in rows if row["rater"] == "Ada"} == {side == "left" for side in good.values()}
    assert len(read_preferences(tmp_path / "out.jsonl")) == 4
    report = agreement_report(store)
    assert (report["votes"], report["raters"], report["voted_by_several"]) == (7, 2, 3)
    assert report["krippendorff_alpha"] == 1.0
    assert report["cohen_kappa"] == [{"raters": ["Ada", "Ben"], "kappa": 1.0, "pairs": 3}]
    assert report["left_share"]["low"] < 0.5 < report["left_share"]["high"]


# ------------------------------------------------------------------------------------------------------ requests


@pytest.fixture
def client(store: PreferenceStore) -> TestClient:
    return TestClient(create_app(store, "Ada"), base_url="http://127.0.0.1:8010")


def test_a_session(client: TestClient, store: PreferenceStore) -> None:
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    consent = client.get("/api/consent").json()
    assert consent["rater"] == "Ada" and "Nothing is sent" in consent["text"]
    assert client.post("/api/next", json={"rater": "Ada"}).json()["agreed"] is False
    state = client.post("/api/agree", json={"rater": "Ada", "consent": consent["hash"]}).json()
    assert state["agreed"] and state["card"]["choice"] is None
    voted = client.post("/api/vote", json={"rater": "Ada", "pair": state["card"]["id"], "side": "left"}).json()
    assert voted["progress"]["done"] == 1 and voted["card"]["id"] != state["card"]["id"]
    back = client.post("/api/back", json={"rater": "Ada", "pair": voted["card"]["id"]}).json()
    assert back["card"]["choice"] == "left"
    assert client.post("/api/forget", json={"rater": "Ada"}).json() == {"deleted": 1}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seconds", "NaN", "at seconds: "),
        ("seconds", "1e999", "at seconds: "),
        ("pair", '"\\ud800"', "at pair: "),
        ("why", '"\\ud800"', "at why: "),
        ("\\ud800", "1", "at its beginning: "),
    ],
)
def test_values_that_json_cannot_say_again(client: TestClient, field: str, value: str, said: str) -> None:
    rows = {"rater": '"Ada"', "pair": '"x"', "side": '"left"', field: value}
    body = "{" + ", ".join(f'"{key}": {text}' for key, text in rows.items()) + "}"
    answer = client.post("/api/vote", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422 and answer.json()["error"].count("\n") == 0 and said in answer.json()["error"]


def test_a_file_in_use_does_not_stop_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.preferences.store.BUSY_S", 0.3)
    with PreferenceStore(tmp_path / "votes.sqlite") as store:
        store.add_pairs([Pair("p", "a", "b")])
        store.agree("Ada", CONSENT_HASH)
        served = Served(create_app(store, "Ada"))
        vote = {"rater": "Ada", "pair": store.order("Ada")[0], "side": "left"}
        other = sqlite3.connect(tmp_path / "votes.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(f"{served.url}/api/vote", json=vote)))
        waiting.start()
        assert httpx.get(served.url).status_code == 200 and not answers  # the vote still waits
        waiting.join()
        assert answers[0].status_code == 503 and "try again" in answers[0].json()["error"]
        other.execute("ROLLBACK")
        assert httpx.post(f"{served.url}/api/vote", json=vote).status_code == 200
        other.close()
        served.stop()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/vote", {"rater": "Ada", "pair": "x", "side": "left"}, 400),
        ("/api/vote", {"rater": "Ada", "pair": "x", "side": "left", "seconds": -1}, 422),
        ("/api/vote", {"rater": "Ada", "pair": "x", "side": "left", "admin": True}, 422),
        ("/api/vote", {"rater": ["Ada"], "pair": "x", "side": "left"}, 422),
        ("/api/next", {"rater": "a\u0000b"}, 400),
        ("/api/next", {"rater": "x" * 70_000}, 413),
    ],
)
def test_bad_requests(client: TestClient, path: str, body: dict[str, Any], status: int) -> None:
    assert client.post(path, json=body).status_code == status


def test_a_body_without_a_length_is_refused(client: TestClient) -> None:
    assert client.post("/api/next", content=iter([b'{"rater": "Ada"}'])).status_code == 413


def test_other_sites_and_names_are_refused(client: TestClient) -> None:
    body = {"rater": "Ada"}
    assert client.post("/api/next", json=body, headers={"origin": "https://evil.example"}).status_code == 403
    assert client.post("/api/next", json=body, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403  # DNS rebinding
    assert client.post("/api/next", json=body, headers={"origin": "http://127.0.0.1:8010"}).status_code == 200


def test_the_page_names_no_other_place() -> None:
    text = page_text()
    assert "http://" not in text and "https://" not in text and "innerHTML" not in text and "{{" not in text


def test_only_this_machine() -> None:
    with pytest.raises(UsageError, match="no password"):
        bind_local("0.0.0.0", 0)


def test_a_refused_address_or_folder_leaves_no_store(tmp_path: Path) -> None:
    source = write(tmp_path / "pairs.jsonl", {"prompt": "p", "answers": ["a", "b"]})
    with contextlib.closing(bind_local("127.0.0.1", 0)) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, said in (
            (["--host", "0.0.0.0"], "no password"),
            (["--port", port], port),
            (["--port", "0", "--store", str(tmp_path / "none/x.sqlite")], "none does not exist"),
        ):
            done = CliRunner().invoke(app, ["prefer", str(source), *options])
            assert isinstance(done.exception, UsageError) and said in str(done.exception)
            assert done.output == "" and [*tmp_path.iterdir()] == [source]


def test_votes_from_several_threads(store: PreferenceStore) -> None:
    order = store.order("Ada")

    def work(name: str) -> None:
        store.agree(name, CONSENT_HASH)
        for pair in order:
            store.vote(name, pair, "left")

    threads = [threading.Thread(target=work, args=(f"r{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {len(given) for given in store.votes().values()} == {6}


# ---------------------------------------------------------------------------------------------------------- verb


def test_the_verb_exports_and_reports(tmp_path: Path) -> None:
    source = write(tmp_path / "pairs.jsonl", {"prompt": "p", "answers": ["a", "b"]})
    run = CliRunner()
    missing = run.invoke(app, ["prefer", str(source), "--agreement"])
    assert isinstance(missing.exception, UsageError) and "no votes yet" in str(missing.exception)
    with PreferenceStore(tmp_path / "pairs.sqlite") as store:
        store.add_pairs(read_pairs(source))
        for option in (["--agreement"], ["--export", str(tmp_path / "out.jsonl")]):
            missing = run.invoke(app, ["prefer", str(source), *option])
            assert isinstance(missing.exception, UsageError) and "no votes yet" in str(missing.exception)
            assert not (tmp_path / "out.jsonl").exists()
        for rater in ("Ada", "Ben"):
            store.agree(rater, CONSENT_HASH)
            store.vote(rater, store.order(rater)[0], "tie")
    done = run.invoke(app, ["prefer", str(source), "--export", str(tmp_path / "out.jsonl"), "--agreement", "--json"])
    found = json.loads(done.stdout)
    assert found["exported"] == 2 and found["ties"] == 2 and found["krippendorff_alpha"] is None
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["tie"] is True
    write(source, {"prompt": "p", "answers": ["a", "edited"]})
    left = run.invoke(app, ["prefer", str(source), "--agreement"])
    assert isinstance(left.exception, UsageError) and "no votes yet" in str(left.exception)
    assert "(2 are on other pairs)" in str(left.exception)


def test_the_verb_says_what_is_left_out_and_rounds(
    tmp_path: Path, store: PreferenceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rater, sides in (("Ada", "ftff"), ("Ben", "ttft")):
        store.agree(rater, CONSENT_HASH)
        for pair, side in zip(store.order("Ada"), sides, strict=True):
            first = "right" if swaps(rater, pair) else "left"
            store.vote(rater, pair, "tie" if side == "t" else first)
    cards = [store.card("Ada", pair) for pair in store.order("Ada")]
    source = write(tmp_path / "pairs.jsonl", *({"prompt": c.prompt, "answers": [c.left, c.right]} for c in cards[:3]))
    line = ["prefer", str(source), "--store", str(store.path)]
    exact, shown = (CliRunner().invoke(app, [*line, "--agreement", *end]).stdout for end in (["--json"], []))
    found = json.loads(exact)
    assert found["pairs"] == 3 and found["votes_on_other_pairs"] == 2 and found["cohen_kappa"][0]["kappa"] > 0.3999
    assert re.search(r"^krippendorff_alpha +0\.444$", shown, re.M) and not re.search(r"\d\.\d{4}", shown)
    monkeypatch.setattr("glm5.preferences.app.serve_page", lambda *_: None)
    done = CliRunner().invoke(app, [*line, "--port", "0"])
    assert "3 pairs (0 new)" in done.stderr and f"1 more, not asked because not in {source}." in done.stderr


@pytest.mark.parametrize(
    ("source", "export"),
    [
        ("pairs.jsonl", "pairs.jsonl"),
        ("pairs.jsonl", "pairs.sqlite"),
        ("pairs.jsonl", "pairs.sqlite-wal"),
        ("pairs.jsonl", "link"),
        ("pairs.jsonl", "hard"),
        (".", "pairs.jsonl"),
        (".", "deeper/votes.jsonl"),
        (".", "preferences.sqlite"),
    ],
)
def test_an_export_overwrites_none_of_its_inputs(tmp_path: Path, source: str, export: str) -> None:
    """By name or by link; nor does it add to a folder what would be read as pairs."""
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": "p", "answers": ["a", "b"]})
    (tmp_path / "link").symlink_to(pairs)
    (tmp_path / "hard").hardlink_to(pairs)
    store = tmp_path / ("preferences.sqlite" if source == "." else "pairs.sqlite")
    with PreferenceStore(store) as votes:
        votes.add_pairs(read_pairs(pairs))
        votes.agree("Ada", CONSENT_HASH)
        votes.vote("Ada", votes.order("Ada")[0], "tie")
    before = {path: path.read_bytes() for path in (pairs, store)}
    done = CliRunner().invoke(app, ["prefer", str(tmp_path / source), "--export", str(tmp_path / export)])
    assert isinstance(done.exception, UsageError) and "export to another file" in str(done.exception)
    assert before[pairs] == pairs.read_bytes() and not (tmp_path / "deeper").exists()
    with PreferenceStore(store) as votes:
        assert votes.export(tmp_path / "out.txt", tmp_path) == 1
