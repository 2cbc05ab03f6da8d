"""SFT: how rows are packed and mixed, what the loss is a mean over, and that errors in the context are not learnt."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glm5.chat import Tokenizer, render_chat
from glm5.config.optim import OptimConfig
from glm5.config.recipe import FamilyConfig, SftStage
from glm5.data.packing import Batch
from glm5.data.sft import BadLines, read_conversations
from glm5.data.sft_rows import RowCounts, SftRow, conversation_rows
from glm5.engine.engine import Engine
from glm5.errors import ConfigError, DataError
from glm5.model.context import packed_context
from glm5.obs.metrics import read_metrics
from glm5.records import Message, SamplingParams
from glm5.train import sft

OPTIM = OptimConfig(steps=25, lr=1e-2, final_lr=2e-3, warmup=3, save_every=0)


def sft_stage(**options: Any) -> SftStage:
    return SftStage(**{"kind": "sft", "name": "sft", "optim": OPTIM, "rows": 2, "row_length": 80} | options)


def numbered(lengths: list[int], first: int = 1) -> list[SftRow]:
    """Rows whose every token is their own number."""
    return [SftRow(np.full(n, first + i, np.int32), np.ones(n, np.bool_)) for i, n in enumerate(lengths)]


def placed(batch: Batch) -> list[tuple[int, int]]:
    """(number, length) of the rows of `numbered` in a batch; documents that hold two of them would be caught."""
    found = []
    for ids, documents, mask in zip(batch.ids, batch.documents, batch.loss_mask, strict=True):
        assert torch.equal(mask, documents >= 0)
        assert (documents.diff() >= 0)[documents[1:] >= 0].all()
        for number in range(int(documents.max()) + 1):
            (value,) = ids[documents == number].unique().tolist()
            found.append((value, int((documents == number).sum())))
    return found


# ------------------------------------------------------------------------------------------------------------ packing


@settings(max_examples=60)
@example([50] * 6 + [30] * 6, 0, 1)  # rows that get full before all that waited had their turn
@given(st.lists(st.integers(1, 80), min_size=1, max_size=30), st.integers(0, 2), st.integers(1, 3))
def test_every_conversation_comes_whole_and_once_per_epoch(lengths: list[int], seed: int, rows: int) -> None:
    stage = sft_stage(rows=rows)
    batches = sft.SftBatches({"all": numbered(lengths)}, stage, seed)
    seen: Counter[int] = Counter()
    step = 0
    while sum(seen.values()) < 10 * len(lengths):
        batch = batches(step)
        assert batch.ids.shape == (rows, 80)
        here = placed(batch)
        assert here and all(length == lengths[number - 1] for number, length in here)
        seen.update(number for number, _ in here)
        step += 1
    counts = [seen[i + 1] for i in range(len(lengths))]
    assert max(counts) - min(counts) <= 2  # a conversation may wait for room, but for no longer than an epoch
    drawn = round(batches.numbers(step)["epochs"] * len(lengths))
    assert min(counts) >= drawn // len(lengths) - 2  # and none gets lost
    direct = sft.SftBatches({"all": numbered(lengths)}, stage, seed)(step - 1)
    assert torch.equal(direct.ids, batch.ids) and torch.equal(direct.documents, batch.documents)


def test_rows_are_nearly_full_and_as_many_as_the_stage_says() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3.2, 1.0, 500), 2, 200).astype(int).tolist()
    stage = sft_stage(rows=4, row_length=200)
    batches = sft.SftBatches({"all": numbered(lengths)}, stage, 0)
    used = [int((batches(step).documents >= 0).sum()) for step in range(40)]
    assert sum(used) / (40 * 4 * 200) > 0.97
    numbers = batches.numbers(40)
    assert numbers["fill"] == pytest.approx(sum(used) / (40 * 4 * 200))
    assert numbers["epochs"] == pytest.approx(sum(used) / sum(lengths), abs=0.1)


def test_orders_differ_between_epochs_seeds_and_stages() -> None:
    rows = numbered([40] * 8)

    def order(seed: int = 0, name: str = "sft") -> list[int]:
        batches = sft.SftBatches({"all": rows}, sft_stage(name=name), seed)
        return [n for step in range(4) for n, _ in placed(batches(step))]

    first = order()
    assert sorted(first[:8]) == sorted(first[8:]) == list(range(1, 9))
    assert first[:8] != first[8:] and first == order() and first != order(1) and first != order(name="other")


def test_sources_share_the_tokens_as_they_are_told() -> None:
    sources = {"a": numbered([10] * 5), "b": numbered([40] * 50, first=100)}
    batches = sft.SftBatches(sources, sft_stage(rows=3), 0, {"a": 3.0, "b": 1.0})
    tokens = Counter()
    for step in range(60):
        for number, length in placed(batches(step)):
            tokens["a" if number < 100 else "b"] += length
    assert tokens["a"] / (tokens["a"] + tokens["b"]) == pytest.approx(0.75, abs=0.02)
    epochs = batches.numbers(60)
    assert epochs["epochs/a"] == pytest.approx(tokens["a"] / 50, rel=0.02)
    assert epochs["epochs/b"] == pytest.approx(tokens["b"] / 2000, rel=0.05)


# --------------------------------------------------------------------------------------------------------- what is read


def talk(question: str, answer: Any, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "thinking": False} | more


def thoughtful(question: str, thought: str, answer: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "reasoning_content": thought, "content": answer}
    return {"messages": [{"role": "user", "content": question}, turn]}


def write(path: Path, *lines: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def load_rows(source: Any, stage: SftStage, tokenizer: Any, bad: BadLines) -> tuple[list[SftRow], RowCounts]:
    counts = RowCounts()
    return [row for _, row in sft.read_rows(source, stage, tokenizer, bad, counts)], counts


def test_the_account_of_a_file(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mute = talk("q", [{"type": "text", "text": "a", "train": False}])
    data = write(tmp_path / "c.jsonl", talk("q", "abc"), "{", talk("q", "a" * 100), talk("q", "ab"), mute)
    stage = sft_stage(data=data, bad_lines="skip")
    with caplog.at_level(logging.WARNING):
        batches, info = sft.prepare(stage, tokenizer, tmp_path, 0)
    # [gMASK]<sop><|user|>q<|assistant|></think>abc<|user|>: ten tokens with four targets, and one less of each.
    told = dict(conversations=4, bad_lines=1, rows=2, too_long=1, lost_targets=101, untrained=1, tokens=19, targets=7)
    assert vars(info.counts) == told
    warnings = [r.getMessage() for r in caplog.records]
    assert any("c.jsonl:2 is skipped" in w for w in warnings) and any("1 rows are longer" in w for w in warnings)
    assert sorted(len(row.ids) for row in batches.sources["all"].rows) == [9, 10]


CONFLICT = talk("q", "a", messages=[{"role": "assistant", "content": "a", "reasoning": "r"}])


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        (["{"], {}, "c.jsonl:1: not a conversation: not JSON"),
        (["{"], {"bad_lines": "skip"}, "contains no conversation .1 bad lines."),
        ([talk("q", "a"), talk("q", "a" * 80)], {"too_long": "error"}, "c.jsonl:2: 87 tokens do not fit into a row"),
        ([talk("q", "a" * 80)], {}, "none of 1 conversations .* 1 rows are longer than 80"),
        ([talk("q", "a", tools=[{"name": "f", "x": [[]]}])], {"thinking": "turn"}, ""),
        ([CONFLICT], {}, ":1: not a conversation: .* thinking is off"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(
    lines: list[Any], options: Any, says: str, tokenizer: Any, tmp_path: Path
) -> None:
    stage = sft_stage(data=write(tmp_path / "c.jsonl", *lines), row_length=80, **options)
    if not says:
        with pytest.raises(DataError, match="none of 1 conversations"):  # the tool block is longer than a row
            sft.prepare(stage, tokenizer, tmp_path, 0)
        return
    with pytest.raises(DataError, match=says):
        sft.prepare(stage, tokenizer, tmp_path, 0)


@pytest.mark.parametrize("length", range(20, 45))
def test_rows_are_cut_behind_whole_turns(length: int, tokenizer: Any, tmp_path: Path) -> None:
    messages = [*talk("q", "first")["messages"], *talk("q", "second")["messages"], *talk("q", "third")["messages"]]
    messages[3]["content"] = [{"type": "text", "text": "sec", "train": False}, {"type": "text", "text": "ond"}]
    data = write(tmp_path / "c.jsonl", {"messages": messages, "thinking": False}, talk("q", "short"))
    stage = sft_stage(data=data, row_length=length, too_long="cut")
    (row, _), counts = load_rows(data, stage, tokenizer, BadLines())
    whole = conversation_rows(next(c for _, c in read_conversations(Path(data))), tokenizer)[0]
    text = tokenizer.decode(row.ids[row.mask].tolist())
    # [gMASK]<sop> and twice six tokens around question and answer: the first turn ends at 12, the second at 22.
    assert text == ("first<|user|>" if length < 22 else "first<|user|>ond<|user|>" + "third<|user|>" * (length >= 31))
    assert row.ids.tolist() == whole.ids[: len(row.ids)].tolist() and row.mask[-1]
    assert len(row.ids) == (12 if length < 22 else 22 if length < 31 else 31)
    assert counts.too_long == (length < 31)
    assert counts.lost_targets == int(whole.mask.sum()) - int(row.mask.sum())


def test_a_bad_line_that_only_rendering_finds_is_skipped_too(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "c.jsonl", CONFLICT, talk("q", "a"))
    counts = sft.prepare(sft_stage(data=data, bad_lines="skip"), tokenizer, tmp_path, 0)[1].counts
    assert (counts.bad_lines, counts.conversations, counts.rows) == (1, 1, 1)


@pytest.mark.parametrize("depth", [100, 300, 900, 970, 990, 1000, 5000])
def test_deep_nesting_is_rendered_or_a_bad_line(depth: int, tokenizer: Any, tmp_path: Path) -> None:
    nested = '{"a": ' * depth + "1" + "}" * depth
    call = json.dumps(talk("q", "a", tools=[{"name": "f", "parameters": "NEST"}])).replace('"NEST"', nested)
    data = write(tmp_path / "c.jsonl", call, talk("q", "a"))
    bad = BadLines("skip")
    rows, _ = load_rows(data, sft_stage(row_length=50_000), tokenizer, bad)
    assert len(rows) + bad.count == 2 and (depth > 300 or not bad.count)


def test_files_folders_and_demonstrations_together(tokenizer: Any, tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", talk("q", "1"))
    write(tmp_path / "more" / "a.jsonl", talk("q", "2"), talk("q", "3"))
    write(tmp_path / "more" / "b.jsonl", talk("q", "4"))
    more = str(tmp_path / "more")
    families = [FamilyConfig(name="arithmetic", options={"levels": [1], "thinking": False})]
    for data, sources in (
        ([one, more], {"all": 4}),
        ({one: 1.0, more: 2.0}, {one: 1, more: 3}),
    ):
        batches, info = sft.prepare(sft_stage(data=data), tokenizer, tmp_path / "x", 0)
        assert {name: len(s.rows) for name, s in batches.sources.items()} == sources
        assert info.counts.rows == 4
    (tmp_path / "io").mkdir()
    stage = sft_stage(data={one: 1.0, "families": 3.0}, families=families, conversations=10)
    batches, info = sft.prepare(stage, tokenizer, tmp_path / "io", 0)
    assert {name: len(s.rows) for name, s in batches.sources.items()} == {"families": 10, one: 1}
    assert batches.shares == {one: 1.0, "families": 3.0} and (tmp_path / "io" / "conversations.jsonl").exists()
    batches, info = sft.prepare(sft_stage(data=one, families=families, conversations=10), tokenizer, tmp_path / "io", 0)
    assert info.counts.rows == 11 and len(batches.sources["all"].rows) == 11
    with pytest.raises(ConfigError, match="nothing to train on"):
        sft.prepare(sft_stage(), tokenizer, tmp_path, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"data": {"a": 0.0}},
        {"data": {"a": float("nan")}},
        {"data": {"a": 1.0, "families": 1.0}},
        {"data": {"a": 1.0}, "families": [{"name": "arithmetic"}]},
        {"thinking": "always"},
        {"text_share": 1.0},
    ],
)
def test_recipes_that_say_the_impossible(options: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        sft_stage(**options)


def test_the_stage_says_which_reasoning_a_turn_sees(tokenizer: Any, tmp_path: Path) -> None:
    messages = [*thoughtful("q", "a", "b")["messages"], *thoughtful("q", "c", "d")["messages"]]
    data = write(tmp_path / "c.jsonl", {"messages": messages})
    for thinking, count in (("preserved", 1), ("interleaved", 2)):
        rows, _ = load_rows(data, sft_stage(thinking=thinking), tokenizer, BadLines())
        assert len(rows) == count


def test_the_template_that_sorts_tool_results_sorts_them_in_training(tmp_path: Path) -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in "ab"]
    messages: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": name, "content": name} for name in "ba"]
    messages += [{"role": "assistant", "content": "x"}]
    data = write(tmp_path / "c.jsonl", {"messages": messages})
    for version in ("5.2", "5.3"):
        tok = Tokenizer.byte_level(version)
        (row,), _ = load_rows(data, sft_stage(row_length=200), tok, BadLines())
        prompt = render_chat(messages[:-1], tokenizer=tok, clear_thinking=False).ids
        assert row.ids[: len(prompt)].tolist() == prompt


def test_plain_text_takes_its_share_of_the_rows(tokenizer: Any, shard: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "c.jsonl", *(talk("q", "x" * n) for n in range(1, 40)))
    stage = sft_stage(data=data, rows=3, text_share=0.25)
    batches, _ = sft.prepare(stage, tokenizer, tmp_path, 0, {"corpus": shard})
    texts = []
    for step in range(8):
        batch = batches(step)
        assert batch.ids.shape == (3, 80)
        plain = batch.loss_mask.all(1)
        texts += ["".join(tokenizer.decode(row.tolist())) for row in batch.ids[plain]]
    assert len(texts) == 6 and len(set(texts)) == 6 and all("of file" in text for text in texts)
    assert batches.numbers(8)["fill"] > 0.9
    with pytest.raises(ConfigError, match="text_share"):
        sft.prepare(stage, tokenizer, tmp_path, 0)


def test_demonstrations_follow_the_weights() -> None:
    families = [
        FamilyConfig(name="arithmetic", weight=3.0, options={"levels": [1], "thinking": True}),
        FamilyConfig(name="toolcall", weight=1.0, render_tools=False),
        FamilyConfig(name="toolcall", weight=1.0),
    ]
    found = sft.generated_conversations(sft_stage(families=families, conversations=50), seed=0)
    assert len(found) == 50
    assert [c.thinking for c in found] == [True] * 30 + [False] * 20
    assert [bool(c.tools) for c in found] == [False] * 40 + [True] * 10
    assert found == sft.generated_conversations(sft_stage(families=families, conversations=50), seed=0)


def test_equal_entries_divide_the_problems_of_their_family() -> None:
    one = FamilyConfig(name="arithmetic", weight=3.0, options={"levels": [3]})
    other, shown = one.model_copy(update={"weight": 1.0}), one.model_copy(update={"render_tools": False})
    alone = sft.generated_conversations(sft_stage(families=[one], conversations=40), seed=0)
    both = sft.generated_conversations(sft_stage(families=[one, other], conversations=40), seed=0)
    assert both == alone  # what one entry of their weight gives
    found = sft.generated_conversations(sft_stage(families=[one, shown], conversations=40), seed=0)
    assert found[20:] == found[:20] == alone[:20]  # another form of the prompt is about the same problems


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("micro_rows", [None, 1, 2])
def test_the_loss_is_the_mean_over_all_trained_tokens_of_the_step(
    micro_rows: int | None, small: Any, tokenizer: Any, stage_io: Any, tmp_path: Path
) -> None:
    """Rows with few and many targets: a mean of the rows' means would be another number."""
    parts = [{"type": "text", "text": "c" * 9, "train": False}, {"type": "text", "text": "d"}]
    lines = [talk("q" * 30, "a"), talk("q", "b" * 60), talk("qq" * 20, parts)]
    optim = OPTIM.model_copy(update={"steps": 1})
    stage = sft_stage(data=write(tmp_path / "c.jsonl", *lines), rows=3, micro_rows=micro_rows, optim=optim)
    model, io = small(vocab_size=tokenizer.vocab_size), stage_io()
    batch = sft.prepare(stage, tokenizer, tmp_path, 0)[0](0)
    with torch.no_grad():
        ctx = packed_context(batch.documents)
        logits = model.lm_head(model.model(batch.ids, ctx)).view(*batch.ids.shape, -1).double()
    logprobs, total, count = logits.log_softmax(-1), 0.0, 0
    for r in range(3):
        for t in range(1, 80):
            if batch.loss_mask[r, t]:
                total, count = total - float(logprobs[r, t - 1, batch.ids[r, t]]), count + 1
    numbers = sft.run(model, stage, tokenizer, io, seed=0)
    assert numbers["loss"] == pytest.approx(total / count, abs=1e-5)
    real = int((batch.documents >= 0).sum())
    assert numbers["tokens"] == count == int(batch.loss_mask.sum())
    assert numbers["fill"] == pytest.approx(real / 240) == numbers["data/fill"]
    assert numbers["trained_share"] == pytest.approx(count / real)


def test_sft_learns_leaves_indexers_alone_and_reuses_its_file(
    small: Any, tokenizer: Any, stage_io: Any, tmp_path: Path
) -> None:
    families = [FamilyConfig(name="arithmetic", options={"levels": [1], "thinking": False})]
    stage = sft_stage(families=families, conversations=40)
    model, io = small(vocab_size=tokenizer.vocab_size), stage_io()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    numbers = sft.run(model, stage, tokenizer, io, seed=0)
    rows = read_metrics(io.metrics.path)
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert rows[-1]["fill"] > 0.8 and 0 < rows[-1]["trained_share"] < 1
    assert (numbers["data/conversations"], numbers["data/rows"], numbers["data/too_long"]) == (40, 40, 0)
    assert numbers["data/trained_share"] == numbers["data/targets"] / numbers["data/tokens"]
    for name, tensor in model.state_dict().items():
        if ".indexer." in name:
            assert torch.equal(tensor, before[name]), name
    assert "indexer" not in (io.folder / "update_table.json").read_text()
    written = (io.folder / "conversations.jsonl").read_bytes()
    assert len(written.splitlines()) == 40 and json.loads(written.splitlines()[0])["thinking"] is False

    # The same file as `data` gives the same run.
    (tmp_path / "own.jsonl").write_bytes(written)
    other = small(vocab_size=tokenizer.vocab_size)
    sft.run(other, sft_stage(data=str(tmp_path / "own.jsonl")), tokenizer, stage_io("other"), seed=0)
    assert all(torch.equal(t, other.state_dict()[n]) for n, t in model.state_dict().items())
    with pytest.raises(DataError, match="does not exist"):
        sft.run(other, sft_stage(data=str(tmp_path / "no.jsonl")), tokenizer, stage_io("third"), seed=0)


def test_an_interrupted_run_ends_with_the_same_weights(
    small: Any, tokenizer: Any, stage_io: Any, tmp_path: Path
) -> None:
    data = write(tmp_path / "c.jsonl", *(talk("q" * (n % 7), "x" * (n % 31)) for n in range(1, 60)))
    stage = sft_stage(data=data, optim=OPTIM.model_copy(update={"steps": 8, "save_every": 3}))
    whole, parts = small(vocab_size=tokenizer.vocab_size), small(vocab_size=tokenizer.vocab_size)
    numbers = sft.run(whole, stage, tokenizer, stage_io("whole"), seed=0)
    with pytest.raises(KeyboardInterrupt):
        sft.run(parts, stage, tokenizer, stage_io("parts", stop_after=5), seed=0)
    again = sft.run(parts, stage, tokenizer, stage_io("parts"), seed=0)
    assert all(torch.equal(t, parts.state_dict()[n]) for n, t in whole.state_dict().items())
    assert {k: v for k, v in numbers.items() if "seconds" not in k} == {
        k: v for k, v in again.items() if "seconds" not in k
    }


def test_a_stage_does_not_go_on_with_other_data(small: Any, tokenizer: Any, stage_io: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "c.jsonl", talk("q", "a"), talk("q", "b"))
    stage = sft_stage(data=data, optim=OPTIM.model_copy(update={"steps": 6, "save_every": 2}))
    model = small(vocab_size=tokenizer.vocab_size)
    with pytest.raises(KeyboardInterrupt):
        sft.run(model, stage, tokenizer, stage_io(stop_after=3), seed=0)
    write(tmp_path / "c.jsonl", talk("q", "a"), talk("q", "c"))
    with pytest.raises(DataError, match=r"the data changed since the stage began .*rows\.json"):
        sft.run(model, stage, tokenizer, stage_io(), seed=0)
    write(tmp_path / "c.jsonl", talk("q", "a"), talk("q", "b"))
    sft.run(model, stage, tokenizer, stage_io(), seed=0)


def test_the_engine_says_what_was_trained_and_not_what_was_masked(
    small: Any, tokenizer: Any, stage_io: Any, tmp_path: Path
) -> None:
    """Two conversations by hand, one with an error in the middle of a turn. A model that fits them says the right
    turns; behind the same prompt the error is no more likely than before, and behind the error comes the correction."""
    wrong, right = "Five! ", "No, 4."
    parts = [{"type": "text", "text": wrong, "train": False}, {"type": "text", "text": right}]
    lines = [
        thoughtful("hi", "greet", "Hello."),
        thoughtful("2+2", "sum", parts),
    ]
    lines[0]["messages"] += thoughtful("bye", "leave", "Ciao.")["messages"]
    optim = OptimConfig(steps=50, lr=2e-2, final_lr=2e-3, warmup=5, save_every=0, weight_decay=0.0)
    stage = sft_stage(data=write(tmp_path / "c.jsonl", *lines), optim=optim)
    model = small(vocab_size=tokenizer.vocab_size, hidden_size=48, use_dsa=False, index_topk=None)
    numbers = sft.run(model, stage, tokenizer, stage_io(), seed=0)
    assert numbers["loss"] < 0.05
    engine = Engine(model, tokenizer)

    def answer(ids: list[int]) -> str:
        (completion,) = engine.generate(
            [ids], SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=tokenizer.stop_token_ids)
        )
        return tokenizer.decode(completion.token_ids)

    def prompt(*messages: Message) -> list[int]:
        return render_chat(messages, tokenizer=tokenizer, clear_thinking=False).ids

    first = Message("assistant", "Hello.", "greet")
    assert answer(prompt(Message("user", "hi"))) == "greet</think>Hello.<|user|>"
    assert answer(prompt(Message("user", "hi"), first, Message("user", "bye"))) == "leave</think>Ciao.<|user|>"
    assert wrong not in answer(prompt(Message("user", "2+2")))
    thought = [*prompt(Message("user", "2+2")), *tokenizer.encode("sum"), tokenizer.special["</think>"]]
    assert answer([*thought, *tokenizer.encode(wrong)]) == right + "<|user|>"

    # Without the mark the same model learns the error, so it is the mask that keeps it out.
    lines[1]["messages"][1]["content"] = wrong + right
    other = small(vocab_size=tokenizer.vocab_size, hidden_size=48, use_dsa=False, index_topk=None)
    sft.run(
        other, stage.model_copy(update={"data": write(tmp_path / "d.jsonl", *lines)}), tokenizer, stage_io("d"), seed=0
    )
    engine = Engine(other, tokenizer)
    assert answer(prompt(Message("user", "2+2"))) == f"sum</think>{wrong}{right}<|user|>"
