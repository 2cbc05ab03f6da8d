"""Tokenizer: round trips, special tokens, determinism, files."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat import SPECIAL_TOKENS, StreamDecoder, Tokenizer, split_pattern, tokenizer_files
from glm5.chat.split_pattern import any_of, check_split, pieces
from glm5.errors import CheckpointError, ConfigError, TooLongError

TEXTS = ["the cat sat on the mat, the end.\n" * 4, "def f(x):\n    return x + 12345\n", "naïve 语言模型 🙂"]
TRAINED = Tokenizer.train(TEXTS, 340)
BYTES = Tokenizer.byte_level()

anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(SPECIAL_TOKENS)
few = settings(max_examples=40, deadline=None)


@few
@given(anything)
def test_text_round_trip(text: str) -> None:
    for tokenizer in (TRAINED, BYTES):
        for allow_special in (False, True):
            assert tokenizer.decode(tokenizer.encode(text, allow_special)) == text
    assert TRAINED.encode_batch([text, "x"]) == [TRAINED.encode(text), TRAINED.encode("x")]


@few
@given(st.binary(max_size=40))
def test_bytes_round_trip_and_streaming(data: bytes) -> None:
    ids_of_bytes = {BYTES.decode_bytes([i]): i for i in range(256)}
    ids = [ids_of_bytes[bytes([byte])] for byte in data]
    assert BYTES.decode_bytes(ids) == data
    decoder = StreamDecoder(BYTES)
    assert "".join(decoder.feed([i]) for i in ids) + decoder.finish() == BYTES.decode(ids)


def test_stream_decoder_holds_back_incomplete_characters() -> None:
    decoder = StreamDecoder(BYTES)
    assert [decoder.feed([i]) for i in BYTES.encode("é🙂")] == ["", "é", "", "", "", "🙂"]
    assert decoder.finish() == ""


def test_special_tokens_come_last_and_only_when_allowed() -> None:
    first = TRAINED.vocab_size - len(SPECIAL_TOKENS)
    assert [TRAINED.special[name] for name in SPECIAL_TOKENS] == list(range(first, TRAINED.vocab_size))
    everything = "".join(SPECIAL_TOKENS) + " x " + "<think></think>"
    assert max(TRAINED.encode(everything)) < first
    ids = TRAINED.encode(everything, allow_special=True)
    assert [TRAINED.decode([i]) for i in ids if i >= first] == [*SPECIAL_TOKENS, "<think>", "</think>"]
    assert TRAINED.decode(ids, skip_special=True) == " x "
    assert TRAINED.stop_token_ids == tuple(TRAINED.special[t] for t in ("<|endoftext|>", "<|user|>", "<|observation|>"))
    assert TRAINED.pad_token_id == TRAINED.special["<|endoftext|>"]


def test_pre_tokenizer_never_merges_across_a_border() -> None:
    tokenizer = Tokenizer.train(["12345678 can't stop  here\n\n" * 50], 400)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("12345678 can't stop  here\n\n")]
    assert pieces == ["123", "456", "78", " can", "'t", " stop", " ", " here", "\n\n"]


def test_training_is_deterministic_and_counts_specials() -> None:
    assert TRAINED.hash() == Tokenizer.train(TEXTS, 340).hash()
    assert TRAINED.vocab_size == 340 and BYTES.vocab_size == 256 + len(SPECIAL_TOKENS)
    assert len(TRAINED.encode(TEXTS[0])) < len(BYTES.encode(TEXTS[0]))
    with pytest.raises(ConfigError, match="292"):
        Tokenizer.train(TEXTS, 291)


def test_surrogates_and_padding_ids() -> None:
    assert BYTES.decode(BYTES.encode("a\ud83d\ude42\ud800b")) == "a🙂\ufffdb"
    assert BYTES.decode([BYTES.vocab_size, -1, 10**9]) == ""


def test_save_and_load(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(TEXTS, 320, template_version="5.0")
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert (
            loaded.hash() == tokenizer.hash() == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
        )
        assert loaded.template_version == "5.0"
        assert loaded.encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])
    assert Tokenizer.load(tmp_path, chat_template="5.3").template_version == "5.3"
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).template_version == "5.2"


def test_transformers_reads_the_files_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    TRAINED.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "[gMASK]<sop><|user|>the cat's 1234<|assistant|><think>"
    assert theirs(text).input_ids == TRAINED.encode(text, allow_special=True)
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.padding_side) == (TRAINED.pad_token_id,) * 2 + ("left",)


def altered(**changes: object) -> str:
    """The file of TRAINED with other values; a key with __ reaches one level deeper."""
    data = json.loads(TRAINED._json)
    for key, value in changes.items():
        outer, _, inner = key.partition("__")
        if inner:
            data[outer][inner] = value
        else:
            data[outer] = value
    return json.dumps(data)


def split_by(pattern: object, behavior: str = "Isolated") -> dict[str, object]:
    step = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [step, byte_level]}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (altered(normalizer={"type": "Lowercase"}), "normalizer"),
        (altered(model__dropout=0.5), "dropout"),
        (altered(model__end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (altered(pre_tokenizer=split_by({"Regex": "(a+)+$"})), "not that of a published tokenizer"),
        (altered(pre_tokenizer=split_by({"Regex": r"[)](?:[x\]]|b)*"})), "not that of a published tokenizer"),
        (altered(pre_tokenizer=split_by({"Regex": "a" * 1001})), "not that of a published tokenizer"),
        (altered(pre_tokenizer=split_by({"String": "a"})), "not that of a published tokenizer"),
        (altered(pre_tokenizer=split_by({"Regex": r"(?<=q)(?:\w*\w*\w*\w*z)|[\s\S]"})), "not that of a published"),
        (altered(pre_tokenizer=split_by({"Regex": "a"}, "Removed")), "would lose text"),
        (altered(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 9}), "more than 8 steps"),
        (altered(pre_tokenizer={"type": "Whitespace"}), "Whitespace would change text"),
        (altered(pre_tokenizer={"type": "Sequence", "pretokenizers": []}), "ByteLevel"),
        (
            altered(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 2}),
            "only step ByteLevel",
        ),
        (altered(pre_tokenizer=None), "NoneType"),
        (altered(added_tokens=[{"id": "7", "content": "<think>"}]), "added token"),
        (altered(added_tokens=[{"id": 7, "content": ""}]), "added token"),
        (altered(added_tokens=7), "int"),
        (altered(model__merges=[["a"]]), ""),
        (altered(model__vocab={"a": -1}), ""),
        (altered(model=None), "NoneType"),
    ],
)
def test_files_that_would_change_text_are_refused(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"is not a GLM tokenizer: .*{told}"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_in_a_file_are_ignored() -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    text = "one two three four five six"
    for content in (altered(truncation=cut), altered(padding=pad)):
        assert Tokenizer(content).encode(text) == Tokenizer(content).encode_batch([text])[0] == TRAINED.encode(text)


@few
@given(st.data())
def test_random_damage_is_a_clear_error_or_harmless(data: st.DataObject) -> None:
    """Any value of the file replaced by another: nothing but ValueError-like errors, and text still survives."""
    content = json.loads(BYTES._json)
    place, keys = content, []
    while isinstance(place, dict | list) and place and (not keys or data.draw(st.booleans())):
        keys.append(data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))))
        holder, place = place, place[keys[-1]]
    holder[keys[-1]] = data.draw(st.sampled_from([None, 0, -1, 2**40, 1.5, "", "a", [], {}, [[]], True, "Sequence"]))
    try:
        damaged = Tokenizer(json.dumps(content))
    except Exception:
        return
    assert damaged.decode(damaged.encode("a b\n12345 é")) == "a b\n12345 é"


def test_split_special() -> None:
    assert list(TRAINED.split_special("a<|user|><|user|>b")) == [
        ("a", False),
        ("<|user|>", True),
        ("<|user|>", True),
        ("b", False),
    ]
    assert list(TRAINED.split_special("")) == []


def test_damaged_files_give_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TRAINED.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    good = json.loads(file.read_text())
    ordinary = len(good["model"]["vocab"])
    bad: list[str] = [
        "",
        "[]",
        "[" * 100_000,
        good["version"],
        json.dumps(good)[:500],
        json.dumps({**good, "added_tokens": good["added_tokens"][1:]}),
        json.dumps({**good, "added_tokens": [{**token, "id": 7} for token in good["added_tokens"]]}),
        json.dumps({**good, "model": {**good["model"], "type": "WordPiece"}}),
        json.dumps({**good, "model": {**good["model"], "vocab": {"a": 0}, "merges": []}}),
        json.dumps({**good, "model": {**good["model"], "vocab": {**good["model"]["vocab"], "\u4e00": ordinary}}}),
        json.dumps({**good, "model": {**good["model"], "merges": [["no", "such"]]}}),
    ]
    for content in bad:
        file.write_text(content)
        with pytest.raises(CheckpointError) as caught:
            Tokenizer.load(tmp_path)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        Tokenizer.load(tmp_path / "absent")
    file.write_text(json.dumps(good))
    (tmp_path / "tokenizer_config.json").write_text('{"glm5_template_version": 5.2}')
    with pytest.raises(CheckpointError, match="glm5_template_version"):
        Tokenizer.load(tmp_path)
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", 1000)
    with pytest.raises(CheckpointError, match="1,000"):
        Tokenizer.load(tmp_path)


def test_a_run_that_the_library_cannot_split_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives up with a panic, which is no Exception and would end a server or a run."""
    tokenizer, run = Tokenizer.byte_level(), " " * 12_000_000
    with pytest.raises(TooLongError, match="too long to be split"):
        tokenizer._bpe_ids([run])
    assert len(tokenizer.encode(run[:600_000])) == 600_000  # in pieces
    longest = 0

    def counted(self: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        nonlocal longest
        longest = max(longest, *map(len, texts))
        return [[0] * len(text) for text in texts]

    monkeypatch.setattr(Tokenizer, "_bpe_ids", counted)
    assert len(tokenizer.encode(run)) == len(run) and longest < 300_000


@pytest.mark.parametrize("pattern", sorted(split_pattern.KNOWN))
def test_known_patterns_take_runs_of_any_character(pattern: str) -> None:
    """In linear time: a quadratic one would not end."""
    check_split({"pattern": {"Regex": pattern}, "behavior": "Isolated"})
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for kind in " \n\ta1!'A中\u0301":
        for end in ("", "x", "!"):
            text = kind * 20_000 + end
            assert "".join(piece for piece, _ in split.pre_tokenize_str(text)) == text


def test_an_operator_may_vouch_for_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    own = altered(pre_tokenizer=split_by({"Regex": r"[!\"#$%&'()*+,\-./\]]+|(?i:'s|'t)?|\p{N}{1,3}"}))
    with pytest.raises(ValueError, match="GLM5_TRUST_SPLIT_PATTERN=1"):
        Tokenizer(own)
    monkeypatch.setenv(split_pattern.TRUST, "1")
    assert Tokenizer(own).vocab_size == TRAINED.vocab_size


WORDS = st.text("ab<|é", min_size=1, max_size=6)


@given(st.sets(WORDS, min_size=1), st.text("ab<|é", max_size=60))
def test_any_of_finds_the_longest_word(words: set[str], text: str) -> None:
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    assert re.findall(any_of(words), text) == re.findall(longest_first, text)


def test_many_added_tokens_cost_a_text_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of thousands of alternatives took minutes per megabyte; this one goes along each place once."""
    many = json.loads(altered())
    first = max(token["id"] for token in many["added_tokens"]) + 1
    many["added_tokens"] += [{"id": first + i, "content": f"<<{i}"} for i in range(900)]
    tokenizer = Tokenizer(json.dumps(many))
    assert list(tokenizer.split_special("<" * 100_000 + "<<899")) == [("<" * 100_000, False), ("<<899", True)]
    for changed, told in ((["x"] * 2000, "more than 1,024 tokens"), (["x" * 129], "more than 128 characters")):
        many["added_tokens"] = [{"id": i, "content": text} for i, text in enumerate(changed)]
        with pytest.raises(ValueError, match=told):
            Tokenizer(json.dumps(many))


def test_a_text_that_is_too_long_is_refused_before_it_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = 0, Tokenizer._bpe_ids

    def counted(self: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        nonlocal read
        read += sum(map(len, texts))
        return real(self, texts)

    monkeypatch.setattr(Tokenizer, "_bpe_ids", counted)
    for text in ("x<" * 4_000_000, "<|user|>" * 1_000_000):
        with pytest.raises(TooLongError, match="more than 200000 tokens"):
            Tokenizer.byte_level().bounded(200_000).encode(text, allow_special=True)
    assert read <= 1 << 19
    text = "def f(x):\n    return x\n\n\nclass A: pass\n" * 8_000
    whole = TRAINED.encode(text)
    assert whole == TRAINED.bounded(10**7).encode(text) == [i for part in pieces(text) for i in TRAINED.encode(part)]


@pytest.mark.parametrize("pattern", [p for p in sorted(split_pattern.KNOWN) if p.endswith(r"|\s+")])
@given(text=st.text("ab1 \n/;'é中", min_size=20, max_size=80), longest=st.integers(3, 20))
def test_pieces_end_where_known_patterns_split(pattern: str, text: str, longest: int) -> None:
    def split(part: str) -> list[str]:
        return [found for found, _ in splitter.pre_tokenize_str(part)]

    splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for before, after in itertools.pairwise(pieces(text, longest)):
        if before.endswith("\n") and after[0].isalnum() and not before[-2:-1].isspace():
            assert split(before + after) == split(before) + split(after)
