"""Recipes: what loads, what is refused and in which words, and that a saved recipe is the recipe."""

from __future__ import annotations

import tomllib
import tracemalloc
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.load import dump_recipe, load_recipe
from glm5.config.recipe import AgenticStage
from glm5.config.schema import Frozen
from glm5.config.toml_reader import parse_toml
from glm5.config.toml_writer import write_toml
from glm5.errors import ConfigError, Glm5Error, UsageError


class Optim(Frozen):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float | None = None


class Pretrain(Frozen):
    kind: Literal["pretrain"] = "pretrain"
    name: str
    steps: int = 100
    optim: Optim = Optim()


class Sft(Frozen):
    kind: Literal["sft"]
    name: str
    epochs: int = 1
    pretrain: Optim | None = None  # a key that is also the tag of another member of the union


class Recipe(Frozen):
    name: str
    seed: int = 0
    lambda_: float = pydantic.Field(0.5, alias="lambda")
    out: Path = Path("runs")
    limit: int | Literal["none"] = "none"
    sizes: dict[str, int] = {}
    optim: Optim = Optim()
    stages: list[Annotated[Pretrain | Sft, pydantic.Field(discriminator="kind")]] = []

    @pydantic.field_validator("seed")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value < 0:
            raise ValueError(f"{value} is below 0; choose another seed")
        return value


LAPTOP = """
name = "laptop"
[optim]
lr = 3e-4
[[stages]]
kind = "pretrain"
name = "pretrain"
steps = 200
[[stages]]
kind = "sft"
name = "sft"
"""


def write(folder: Path, text: str, name: str = "laptop.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def message(error: type[Glm5Error], path: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(error) as caught:
        load_recipe(path, Recipe, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_values_come_from_the_file_and_defaults_fill_the_rest(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, LAPTOP), Recipe)
    assert (recipe.name, recipe.seed, recipe.optim.lr, recipe.lambda_) == ("laptop", 0, 3e-4, 0.5)
    assert [(type(stage), stage.name) for stage in recipe.stages] == [(Pretrain, "pretrain"), (Sft, "sft")]
    with pytest.raises(pydantic.ValidationError):
        recipe.seed = 1  # type: ignore[misc]


def test_integers_pass_for_floats(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, 'name = "x"\nlambda = 1'), Recipe).lambda_ == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sede = 1", ['unknown key "sede"', 'did you mean "seed"?']),
        ("[optim]\nlrr = 1", ['unknown key "optim.lrr"', 'did you mean "lr"?']),
        ('[[stages]]\nkind = "sft"\nname = "s"\nepoch = 1', ['unknown key "stages.s.epoch"', 'did you mean "epochs"?']),
        ('[[stages]]\nkind="sft"\nname="s"\n[stages.pretrain]\nl=1', ['"stages.s.pretrain.l"', 'did you mean "lr"?']),
        ('[[stages]]\nname = "p"\nkind = "sfr"', ["stages.p", "sfr", "pretrain"]),
        ('seed = "3"', ['seed is "3"', "expected an integer"]),
        ("seed = true", ["seed is true", "expected an integer"]),
        ("seed = 1.5", ["seed is 1.5", "expected an integer"]),
        ("seed = -1", ["seed: -1 is below 0; choose another seed."]),
        ("limit = 1.5", ["limit is 1.5", "an integer or 'none'"]),
        ("optim = 3", ["optim is 3", "expected a table"]),
        ("stages = 3", ["stages is 3", "expected a list"]),
        ("sizes = {a = 1, b = true}", ["sizes.b is true", "expected an integer"]),
        ("optim = {betas = [0.9, 'x']}", ['optim.betas.1 is "x"', "expected a number"]),
        ("lambda_ = 1.0", ['unknown key "lambda_"', 'did you mean "lambda"?']),
    ],
)
def test_a_wrong_entry_is_one_sentence_with_file_key_and_remedy(tmp_path: Path, change: str, words: list[str]) -> None:
    path = write(tmp_path, f'name = "x"\n{change}')
    text = message(ConfigError, path)
    assert text.startswith(f"{path}: ")
    for word in words:
        assert word in text
    assert "more problem" not in text


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    assert message(ConfigError, write(tmp_path, "seed = 1")).endswith("laptop.toml: name is missing.")


def test_several_problems_are_counted_and_the_misspelt_key_comes_first(tmp_path: Path) -> None:
    text = message(ConfigError, write(tmp_path, "nam = 'x'\nseed = 'y'"))
    assert 'unknown key "nam" (did you mean "name"?).' in text
    assert text.endswith("(2 more problems in this recipe.)")


@pytest.mark.parametrize(
    ("text", "line"), [("a = 1\nb = = 2\n", 2), ("a = 1\n\n[t", 3), ("a = 1\na = 2", 2), ('name = "open', 1)]
)
def test_a_syntax_error_names_file_and_line(tmp_path: Path, text: str, line: int) -> None:
    path = write(tmp_path, text)
    assert message(ConfigError, path).startswith(f"{path}, line {line}: not valid TOML: ")


def test_unreadable_files(tmp_path: Path) -> None:
    assert "does not exist" in message(ConfigError, tmp_path / "none.toml")
    assert "cannot be read" in message(ConfigError, tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"a = 1\nb = '\xe4'")
    assert "latin.toml, line 2: not valid UTF-8" in message(ConfigError, tmp_path / "latin.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (1 << 20) + b"#")
    assert "more than 1,048,576 bytes" in message(ConfigError, tmp_path / "big.toml")
    assert "nested too deeply" in message(ConfigError, write(tmp_path, f"a = {'[' * 100_000}"))


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("seed=7", lambda r: r.seed == 7),
        ("optim.lr=1e-2", lambda r: r.optim.lr == 1e-2),
        ("name=plain text", lambda r: r.name == "plain text"),
        ('name="quoted"', lambda r: r.name == "quoted"),
        ("name=a=b", lambda r: r.name == "a=b"),
        ("stages.pretrain.steps=10", lambda r: r.stages[0].steps == 10),
        ("stages.0.optim.lr=5", lambda r: r.stages[0].optim.lr == 5.0),
        ("optim.betas=[0.8, 0.9]", lambda r: r.optim.betas == (0.8, 0.9)),
        ('sizes."a.b"=2', lambda r: r.sizes == {"a.b": 2}),
    ],
)
def test_overrides(tmp_path: Path, override: str, read: Any) -> None:
    assert read(load_recipe(write(tmp_path, LAPTOP), Recipe, [override]))


def test_one_override_sets_one_value(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, LAPTOP), Recipe, ["name=1\nseed = 3"])
    assert (recipe.name, recipe.seed) == ("1\nseed = 3", 0)


def test_later_overrides_win_and_list_entries_can_be_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, LAPTOP)
    assert load_recipe(path, Recipe, ["seed=1", "seed=2"]).seed == 2
    assert load_recipe(path, Recipe, ["optim.betas=[0.1, 0.2]", "optim.betas.1=0.5"]).optim.betas == (0.1, 0.5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "--set seed is not of the form"),
        ("=3", "is not of the form"),
        ("a b=3", "is not a dotted key"),
        ("stages.pretrian.steps=1", '"pretrian" (did you mean "pretrain"?); it has pretrain, sft'),
        ("stages.7.steps=1", 'stages has no entry "7"'),
        ("name.x=1", 'name is "laptop", which has no keys'),
    ],
)
def test_overrides_that_address_nothing_are_usage_errors(tmp_path: Path, override: str, words: str) -> None:
    assert words in message(UsageError, write(tmp_path, LAPTOP), (override,))


def test_a_wrong_override_is_blamed_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, LAPTOP)
    assert message(ConfigError, path, ("stages.0.steps=many",)) == (
        '--set stages.0.steps=many: stages.pretrain.steps is "many", expected an integer.'
    )
    assert message(ConfigError, path, ("optim.lrr=1",)).startswith('--set optim.lrr=1: unknown key "optim.lrr"')


def test_extends_merges_tables_by_key_and_stages_by_name(tmp_path: Path) -> None:
    write(tmp_path, LAPTOP)
    smoke = 'extends = "laptop.toml"\nname = "smoke"\n[[stages]]\nname = "sft"\nepochs = 3\n'
    smoke += '[[stages]]\nname = "more"\nkind = "sft"\n[optim]\nbetas = [0.5, 0.6]\n'
    recipe = load_recipe(write(tmp_path, smoke, "smoke.toml"), Recipe)
    assert (recipe.name, recipe.optim) == ("smoke", Optim(lr=3e-4, betas=(0.5, 0.6)))
    assert [stage.name for stage in recipe.stages] == ["pretrain", "sft", "more"]
    assert recipe.stages[1] == Sft(kind="sft", name="sft", epochs=3)
    assert recipe.stages[0] == Pretrain(name="pretrain", steps=200)


def test_extends_is_relative_to_the_file_and_may_be_chained(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, LAPTOP)
    write(tmp_path, 'extends = "../laptop.toml"\nseed = 4', "deep/mid.toml")
    top = write(tmp_path, 'extends = "deep/mid.toml"\nname = "top"', "top.toml")
    recipe = load_recipe(top, Recipe)
    assert (recipe.name, recipe.seed, recipe.optim.lr) == ("top", 4, 3e-4)


def test_a_mistake_in_the_extended_file_names_that_file(tmp_path: Path) -> None:
    base = write(tmp_path, LAPTOP.replace("steps", "setps"))
    top = write(tmp_path, 'extends = "laptop.toml"\nseed = 1', "top.toml")
    assert message(ConfigError, top) == f'{base}: unknown key "stages.pretrain.setps" (did you mean "steps"?).'


def test_extends_errors(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "b.toml"', "a.toml")
    write(tmp_path, 'extends = "a.toml"', "b.toml")
    assert "in a circle" in message(ConfigError, tmp_path / "a.toml")
    assert "in a circle" in message(ConfigError, write(tmp_path, 'extends = "self.toml"', "self.toml"))
    assert "extends = 3 is not the name" in message(ConfigError, write(tmp_path, "extends = 3"))
    assert "does not exist" in message(ConfigError, write(tmp_path, 'extends = "gone.toml"'))
    write(tmp_path, LAPTOP)
    twice = 'extends = "laptop.toml"\n' + '[[stages]]\nname = "sft"\n' * 2
    assert 'two tables named "sft"' in message(ConfigError, write(tmp_path, twice, "twice.toml"))


# Round trips. Surrogates cannot be written to a file; all else can.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
optims = st.builds(Optim, lr=numbers, betas=st.tuples(numbers, numbers), momentum=st.none() | numbers)
stages = st.builds(Pretrain, name=texts, steps=st.integers(), optim=optims) | st.builds(
    Sft, kind=st.just("sft"), name=texts, epochs=st.integers(), pretrain=st.none() | optims
)
recipes = st.builds(
    lambda lam, **rest: Recipe(**{"lambda": lam}, **rest),
    lam=numbers,
    name=texts,
    seed=st.integers(min_value=0),
    limit=st.integers() | st.just("none"),
    sizes=st.dictionaries(texts, st.integers(), max_size=3),
    optim=optims,
    stages=st.lists(stages, max_size=3),
)


@given(recipes)
def test_a_saved_recipe_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.getbasetemp() / "saved.toml"
    path.write_text(dump_recipe(recipe), encoding="utf-8", newline="")
    assert load_recipe(path, Recipe) == recipe


plain = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(texts, plain, max_size=4))
def test_the_writer_is_the_inverse_of_tomllib(table: dict[str, Any]) -> None:
    assert tomllib.loads(write_toml(table)) == table


class Switch(Frozen):
    limit: int | None = 3


def test_what_toml_cannot_hold_is_refused_when_saving() -> None:
    with pytest.raises(ConfigError, match="None as its default"):
        dump_recipe(Switch(limit=None))
    with pytest.raises(ConfigError, match="lone surrogate"):
        write_toml({"a": "\ud800"})
    with pytest.raises(ConfigError, match="cannot be written as TOML"):
        write_toml({"a": [None]})
    assert write_toml({"lr": float("nan")}) == "lr = nan\n"


STAGE = dict(kind="agentic", name="rl", optim={"steps": 1, "lr": 0.1}, families=[{"name": "arithmetic"}])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("optim." + key, value) for key, value in (
            ("clip", -1.0), ("clip", float("inf")), ("lr", float("inf")), ("final_lr", float("nan")), ("momentum", 2.0),
            ("weight_decay", -1.0), ("warmup", -5),
        )),
        ("temperature", 0.0), ("temperature", float("nan")), ("beta", -1.0), ("clip_low", 5.0), ("group", 0),
        ("prompts", 0), ("max_tokens", 0), ("concurrency", 0), ("max_staleness", -1), ("train_ticks", -1),
    ],
)  # fmt: skip
def test_numbers_without_meaning_are_refused(key: str, value: float) -> None:
    """A negative bound on the gradient norm would turn the gradient round, for one."""
    changed: dict[str, Any] = {**STAGE, "optim": dict(STAGE["optim"])}  # type: ignore[call-overload]
    section, _, name = key.rpartition(".")
    (changed[section] if section else changed)[name] = value
    AgenticStage.model_validate(STAGE)
    with pytest.raises(ValueError, match=name):
        AgenticStage.model_validate(changed)


def test_long_keys_and_endless_files_cost_nothing(tmp_path: Path) -> None:
    """Python's reader of TOML takes memory by the square of a key's parts."""
    for text in (
        "a" + ".a" * 30_000 + " = 1",
        "x = {" + "'a' . " * 100 + "a = 1}",
        '"a b".' * 30_000 + "a = 1",
        '[["+".' + '"\\u0061".' * 100 + "a]]",
        'x = {a = """b"""", c' + ".d" * 100 + " = 1}",
        "x = {a = '''b''''', c" + ".d" * 100 + " = 1}",
    ):
        path = tmp_path / "long.toml"
        path.write_text(text)
        tracemalloc.start()
        with pytest.raises(ConfigError, match="a key has more than 64 parts"):
            load_recipe(path, Recipe)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
    for text in ("x = '" + "a." * 400_000 + "'", "# " + "a.a" * 300_000, 'x = """' + "\n.a" * 300_000 + '"""'):
        assert isinstance(parse_toml(text), dict)  # in one pass: neither dots in text nor long words make it slow
    with pytest.raises(tomllib.TOMLDecodeError):
        parse_toml('"' * 900_000)
    path.write_text('extends = "/dev/zero"')
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it is not a file"):
        load_recipe(path, Recipe)
    path.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes"):
        load_recipe(path, Recipe)
