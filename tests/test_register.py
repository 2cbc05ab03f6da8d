"""The five registers of what a recipe names: entries of other packages, and entries that must be refused."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5.config.load import dump_recipe, load_recipe
from glm5.config.recipe import STAGES, ReasoningStage, RunRecipe, Stage
from glm5.errors import ConfigError, DataError
from glm5.launch import stages as launch_stages
from glm5.launch.pipeline import _check as check_recipe
from glm5.launch.stages import CustomStage, run_stage
from glm5.register import Register
from glm5.rl.algos import ALGORITHMS, Algorithm, stage_algorithm
from glm5.rl.losses import LOSSES, Objective
from glm5.rl.reward_models import REWARD_MODELS, RewardModel
from glm5.tasks import FAMILIES, Family, make_family

REGISTERS: dict[str, tuple[Register[Any], type]] = {
    "families": (FAMILIES, Family),
    "losses": (LOSSES, Objective),
    "algorithms": (ALGORITHMS, Algorithm),
    "reward_models": (REWARD_MODELS, RewardModel),
    "stages": (STAGES, Stage),
}
MODULE = """
from pydantic import Field
from glm5.launch.stages import CustomStage
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.losses import IcePop
from glm5.rl.reward_models import RewardModel
from glm5.tasks.mathematics.arithmetic import ArithmeticFamily

class Sums(ArithmeticFamily):
    domain = "sums"

class Loss(IcePop):
    @classmethod
    def of(cls, stage):
        return cls(**stage.loss_options)

class Centred(ReasoningRL):
    def __init__(self, stage, scale=1.0):
        super().__init__(stage)
        self.scale = scale

class Length(RewardModel):
    domains = ("sums",)
    def __init__(self, weight=1.0):
        self.weight = weight
    def score(self, pairs):
        return [self.weight * len(answer) for _, answer in pairs]

class Wait(CustomStage):
    seconds: float = Field(1.0, ge=0)
    def run(self, state, io):
        return {"waited": self.seconds}

class Abstract(RewardModel):
    pass

def function(): ...
"""
numbers = itertools.count()
Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with a module and entry points; returns the module's name. Its entries are gone afterwards."""
    for register, _ in REGISTERS.values():
        monkeypatch.setattr(register, "_entries", dict(register._entries))
        monkeypatch.setattr(register, "_unique", set(register._unique))

    def make(source: str = MODULE, **groups: dict[str, str]) -> str:
        name = f"glm5_other_{next(numbers)}"
        folder = tmp_path / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = []
        for group, entries in groups.items():
            lines += [f"[glm5.{group}]", *(f"{key} = {name}:{value}" for key, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(folder))
        return name

    return make


RECIPE = """
name = "other"
start = "somewhere"
[[stages]]
name = "rl"
kind = "general"
algorithm = "general"
loss = "other_loss"
loss_options = { beta = 3.0 }
families = [{ name = "sums", options = { levels = [1] } }]
optim = { steps = 1, lr = 1e-3 }
reward_model = { kind = "length", options = { weight = 0.5 } }
[[stages]]
name = "more"
kind = "reasoning"
algorithm = "centred"
algorithm_options = { scale = 2.0 }
families = [{ name = "sums" }]
optim = { steps = 1, lr = 1e-3 }
[[stages]]
name = "pause"
kind = "wait"
seconds = 2.5
"""
ALL: dict[str, dict[str, str]] = {
    "families": {"sums": "Sums"},
    "losses": {"other_loss": "Loss"},
    "algorithms": {"centred": "Centred"},
    "reward_models": {"length": "Length"},
    "stages": {"wait": "Wait"},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return tmp_path / "recipe.toml"


def test_a_package_adds_to_all_five_registers(install: Install, recipe: Path) -> None:
    module = install(**ALL)
    assert module not in sys.modules
    assert all(name in REGISTERS[group][0] for group, entries in ALL.items() for name in entries)
    assert module not in sys.modules  # names alone import nothing
    loaded = load_recipe(recipe, RunRecipe)
    check_recipe(loaded)
    general, more, pause = loaded.stages
    algorithm: Any = stage_algorithm(general)  # type: ignore[arg-type]
    assert algorithm.objective.beta == 3.0 and algorithm.reward_model.weight == 0.5
    assert stage_algorithm(more).scale == 2.0  # type: ignore[arg-type, attr-defined]
    assert run_stage(None, pause, None) == {"waited": 2.5}  # type: ignore[arg-type]
    again = recipe.with_name("again.toml")
    again.write_text(dump_recipe(loaded), encoding="utf-8")
    assert load_recipe(again, RunRecipe) == loaded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["stages.pause.secnds=1"], 'unknown key "stages.pause.secnds" (did you mean "seconds"?)'),
        (["stages.pause.seconds=-1"], "stages.pause.seconds is -1, expected greater than or equal to 0"),
        (["stages.pause.kind=wiat"], 'unknown stage kind "wiat" (did you mean "wait"?)'),
        (["stages.pause.kind=3"], "it has the kind 3; choose one of agentic"),
        (["stages.0=3"], "stages.0 is 3, expected a table"),
        (["stages.more.algorithm=centered"], 'unknown algorithm "centered" (did you mean "centred"?)'),
        (["stages.more.algorithm_options={scael=1}"], "algorithm \"centred\": Centred.__init__() got an unexpected"),
        (["stages.more.algorithm=general", "stages.more.algorithm_options={}"], '"general" does not fit a stage'),
        (["stages.more.algorithm=distill", "stages.more.algorithm_options={}"], '"distill" does not fit a stage'),
        (["stages.rl.algorithm_options={reward_model=1}"], "multiple values for argument 'reward_model'"),
        (["stages.rl.loss_options={beta=1.5,gamma=1}"], "options given: beta, gamma"),
        (["stages.rl.loss=ppo"], "loss \"ppo\": PPO.__init__() got an unexpected keyword argument 'beta'"),
        (["stages.rl.loss=ppo", 'stages.rl.loss_options={against="old"}'], "multiple values for argument 'against'"),
        (["stages.rl.reward_model.kind=lenght"], 'unknown reward model "lenght" (did you mean "length"?)'),
        (["stages.rl.reward_model.options={wieght=1}"], "reward model \"length\": Length.__init__() got an unexpected"),
        (["stages.rl.reward_model.optim={steps=1,lr=0.1}"], '"length" is not trained; remove reward_model.optim'),
        (["stages.rl.reward_model.kind=learned"], 'a reward model of kind "learned" needs `optim`'),
        (['stages.rl.families=[{name="arithmetic"}]'], 'rl: the reward model "length" scores the domains sums'),
    ],
)  # fmt: skip
def test_what_a_recipe_gets_wrong_is_named(install: Install, recipe: Path, changes: list[str], message: str) -> None:
    install(**ALL)
    with pytest.raises(ConfigError) as caught:
        check_recipe(load_recipe(recipe, RunRecipe, changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_learned_reward_model_takes_no_options(recipe: Path, install: Install) -> None:
    install(**ALL)
    family = 'stages.rl.families=[{name="general"}]'
    learned = 'stages.rl.reward_model={kind="learned", optim={steps=1, lr=0.1}, options={pairs=3}}'
    with pytest.raises(ConfigError, match=r'"learned": it takes no options; .*options given: pairs'):
        check_recipe(load_recipe(recipe, RunRecipe, [family, learned]))


@pytest.mark.parametrize("group", REGISTERS)
def test_hostile_entries_are_refused(install: Install, group: str) -> None:
    register, base = REGISTERS[group]
    builtin = next(iter(register))
    own = register[builtin]
    for wrong in (int, object, "glm5.errors:ConfigError", lambda: None):
        with pytest.raises(ConfigError, match=f'"x" must be a subclass of glm5\'s {base.__name__}'):
            register.add("x", wrong)
    other = type("Other", (own,), {})
    with pytest.raises(ConfigError, match=f'there is already a .* named "{builtin}"; choose another name'):
        register.add(builtin, other)
    register.add(builtin, own)  # the same class again is no conflict
    with pytest.raises(ConfigError, match=r'unknown .* "zzz"; choose one of '):
        register["zzz"]
    entries = {"wrong": "int", "function": "function", "gone": "gone"}
    module = install(**{group: entries | {builtin: "Sums"}})
    with pytest.raises(ConfigError, match=r"\"wrong\" .*cannot be imported: .*no attribute 'int'"):
        register["wrong"]
    with pytest.raises(ConfigError, match='"function" must be a subclass'):
        register["function"]
    with pytest.raises(ConfigError, match=f'"gone" \\({module}:gone\\) cannot be imported'):
        register["gone"]
    with pytest.raises(ConfigError, match=f'more than one .* named "{builtin}" \\({own.__module__}:.*{module}:Sums\\)'):
        register[builtin]


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    modules = {install(losses={"mine": "Loss"}), install(losses={"mine": "Loss"})}
    with pytest.raises(ConfigError) as caught:
        LOSSES["mine"]
    assert all(f"{module}:Loss" in str(caught.value) for module in modules)
    assert LOSSES["icepop"].__name__ == "IcePop"  # other names are not affected


def test_a_package_that_does_not_import_names_itself(install: Install) -> None:
    module = install("raise RuntimeError('no GPU here')", families={"sums": "Sums"})
    with pytest.raises(ConfigError, match=f'"sums" \\({module}:Sums\\) cannot be imported: no GPU here'):
        make_family("sums")
    assert make_family("arithmetic").domain  # the others still work


def test_a_class_that_is_not_finished_is_refused(install: Install) -> None:
    module = install(reward_models={"half": "Abstract"})
    with pytest.raises(ConfigError, match=f'the reward model "half" \\({module}:Abstract\\) must define score'):
        REWARD_MODELS["half"]
    half = type("Half", (CustomStage,), {})
    with pytest.raises(ConfigError, match="must define run"):
        STAGES.add("half", half)


# ---------------------------------------------------------------------------------------------------------- own stages


def own_stage(result: Any) -> CustomStage:
    class Own(CustomStage):
        def run(self, state: Any, io: Any) -> Any:
            return result

    return Own(kind="own", name="own")


@pytest.mark.parametrize("result", [None, 3, [1.0], {"a": "b"}, {"a": float("nan")}, {"a": None}, {"a": [1]}])
def test_a_stage_returns_finite_numbers(result: Any) -> None:
    with pytest.raises(DataError, match=r"^own: .*Own\.run must return a dict of finite numbers\.$"):
        run_stage(None, own_stage(result), None)  # type: ignore[arg-type]
    assert json.dumps(run_stage(None, own_stage({"a": 1}), None)) == '{"a": 1.0}'  # type: ignore[arg-type]


def test_a_stage_without_run_is_refused_before_the_first_stage(install: Install, recipe: Path) -> None:
    install()

    class Idle(Stage):
        pass

    STAGES.add("wait", Idle)
    with pytest.raises(ConfigError, match=r'^pause: .*Idle, the class of the stage kind "wait", has no `run`'):
        launch_stages.runner_of(Idle(kind="wait", name="pause"))


def test_a_stage_may_derive_from_a_built_in_one() -> None:
    class Careful(ReasoningStage):
        kind: Any = "careful"
        minibatches: int = 1

    stage = Careful(name="c", families=[{"name": "arithmetic"}], optim={"steps": 1, "lr": 0.1})  # type: ignore[arg-type]
    assert launch_stages.runner_of(stage) is launch_stages._policy
