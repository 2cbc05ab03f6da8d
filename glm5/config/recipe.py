"""The recipe schema: stages as data (one class per kind), evaluation, and the run around them."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from glm5.config.by_kind import ByKind
from glm5.config.data import DataOptions
from glm5.config.evaluation import EvalConfig
from glm5.config.families import FamilyConfig
from glm5.config.launch import Launch
from glm5.config.optim import OptimConfig
from glm5.config.parallel import Layout
from glm5.config.reward_model import JudgeConfig, RewardMix, RewardModelConfig
from glm5.config.schedule import MOST_DEPTHS, BatchRamp, ByTokens
from glm5.config.schema import Frozen
from glm5.config.stages import expand
from glm5.errors import nearest
from glm5.register import Register


class Stage(Frozen):
    """Common to all stages. `kind` is a name in the register `STAGES`. `expected_seconds` only weights the ETA."""

    kind: str
    name: str
    expected_seconds: float = Field(10.0, ge=0)

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"a stage name is also a folder name, so {name!r} may have only letters, digits, dots, - and _"
            )
        return name


class TokenizerStage(Stage):
    """Train the tokenizer on the sources and tokenise them into shards with a held-out split by file."""

    kind: Literal["tokenizer"]
    vocab_size: int = Field(gt=0)
    sources: list[str] = ["stdlib"]
    dedup: bool = False
    """Drop near-duplicates, so nothing in training resembles a held-out document; needs the extra `data`."""
    max_bytes: int = 1 << 62
    """Use files in order of their path's hash until this many bytes of training text are reached."""


class GradientStage(Stage):
    """A stage with batches of packed rows: `rows` x `row_length` tokens make one optimizer step."""

    optim: OptimConfig
    rows: int = Field(16, ge=1)
    row_length: int = Field(256, ge=2)
    micro_rows: int | None = Field(None, ge=1)
    """Rows per forward pass and rank; gradients of a step's micro-batches add up. None takes all at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward; weights, gradients and optimizer state are fp32 either way."""
    tf32: bool = True
    """With dtype "float32", a GPU's matrix products may round their inputs to TF32 (10 bits of mantissa)."""
    recompute: Literal[True, False, "selective", "auto"] | tuple[Literal[True, False, "selective"], ...] = False
    """Keep only every layer's input and recompute the layer in the backward pass: less memory, more time. "selective"
    also keeps the results of matrix products, attention and selections, and recomputes the rest, which is cheap. A list
    has a setting for each layer, the MTP layer's last. "auto" makes that list when the stage begins, for the device's
    memory or `parallel.memory`: as little is recomputed as the predicted memory of the process allows."""
    compile: bool = False
    """Compile the layers with `torch.compile`: one graph per kind of layer (dense, MoE, MTP), made in the first step,
    which may take minutes. Without a working compiler the layers run as they are, with a warning."""
    offload: bool = False
    """Keep what backward needs in host memory until then: of every layer, or only its input if it is recomputed. On a
    CPU it does nothing."""


class CorpusStage(GradientStage):
    """A stage over the run's shards: next-token loss, MTP at shared depths, expert balance (§2)."""

    mtp_weight: ByTokens = 0.3
    """Weight of multi-token prediction; it and `bias_rate` may change with the tokens of the stage."""
    mtp_depths: int = Field(3, ge=0, le=MOST_DEPTHS)
    balance_weight: float = Field(1e-4, ge=0)
    """Weight of the sequence-level balance loss."""
    bias_rate: ByTokens = 1e-3
    """Change of a router bias per step, against its expert's load."""
    ramp: BatchRamp | None = None
    """The first batches may have fewer rows."""
    corpus: DataOptions = DataOptions()
    """How rows are made of the shards."""

    @model_validator(mode="after")
    def _batch_grows(self) -> Self:
        if self.ramp is not None and self.ramp.rows > self.rows:
            raise ValueError(f"{self.name}: ramp.rows = {self.ramp.rows} is above rows = {self.rows}; a batch grows")
        return self


class PretrainStage(CorpusStage):
    """Pre-training and mid-training (context extension): dense until a DSA stage, even if the model has indexers."""

    kind: Literal["pretrain", "midtrain"]
    rope_theta: float | None = None
    max_position_embeddings: int | None = None


class DsaStage(CorpusStage):
    """DSA adaptation (§2.1.1): `dsa_warmup` trains only the indexer, under dense attention; `dsa_sparse` everything."""

    kind: Literal["dsa_warmup", "dsa_sparse"]
    indexer_weight: float = Field(1.0, ge=0)
    """Weight of the indexers' KL in the sparse stage; it is the only loss of the warm-up."""
    share_indexers: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern="^F[FS]*$")] | None = None
    """IndexShare: before the stage, drop the indexers of some layers; these reuse the keys that the nearest layer
    before them with an indexer selects. A number n keeps those of the first three layers and then of every n-th
    (GLM-5.2: 4); a text has one letter per layer, F (keeps its indexer) or S. An indexer learns from all layers that
    use it."""
    mtp_weight: ByTokens = 0.1


class SftStage(GradientStage):
    """Supervised fine-tuning on conversations: demonstrations of task families, files of `messages`, or both (§3.1)."""

    kind: Literal["sft"]
    families: list[FamilyConfig] = []
    conversations: int = 2000
    """Number of demonstrations from the families."""
    data: str | list[str] | dict[str, float] | None = None
    """JSONL files of `messages`, or folders of such files. A table gives each its share of the tokens, in any unit; its
    key `families` means the demonstrations. Without a table every conversation comes once per epoch."""
    thinking: Literal["preserved", "interleaved", "turn"] = "preserved"
    """Which earlier reasoning a turn sees: "preserved" all, "interleaved" only that since the last user message, "turn"
    all; with "turn", a turn without reasoning counts as not asked to think unless the data says otherwise."""
    text_share: float = Field(0.0, ge=0, lt=1)
    """Share of rows with plain text of the run's shards; every token of it is a target."""
    bad_lines: Literal["error", "skip"] = "error"
    """A malformed line of the files: "error" ends the run, "skip" counts and logs the line."""
    too_long: Literal["drop", "cut", "error"] = "drop"
    """A conversation longer than `row_length`: "drop" leaves it out, "cut" cuts it after the last whole turn that fits
    (both are counted), "error" ends the run."""
    mtp_weight: float = 0.0
    mtp_depths: int = Field(1, ge=0, le=MOST_DEPTHS)
    bias_rate: float = 0.0
    qat: Literal["w4a16", "w4a8", "w8a8"] | None = None
    """Quantization-aware training (§2.4): matrices, and activations if the scheme has them, are rounded as `glm5
    quantize --scheme` rounds them, and gradients pass straight through. "w4a16" rounds the routed experts to int4 in
    groups of 32. The checkpoint has the weights before rounding; quantizing it gives what was trained, bit for bit."""

    @model_validator(mode="after")
    def _shares_name_all(self) -> Self:
        if isinstance(self.data, dict):
            if bad := [name for name, share in self.data.items() if share <= 0]:
                raise ValueError(
                    f"{self.name}: the share of {bad[0]} in `data` is {self.data[bad[0]]}; it must be above 0"
                )
            if bool(self.families) != ("families" in self.data):
                raise ValueError(
                    f"{self.name}: `data` is a table of shares; add the key `families`, the share of the "
                    "demonstrations, if and only if the stage has `families`"
                )
        return self


class PolicyStage(Stage):
    """Common to all reinforcement-learning stages. `prompts` x `group` rollouts make one optimizer step."""

    algorithm: str
    """A name in the register of algorithms (`glm5/rl/algos/registered.py`), or one that other code adds."""
    algorithm_options: dict[str, Any] = {}
    """Options of an algorithm that has no keys of its own here."""
    optim: OptimConfig
    families: list[FamilyConfig]
    prompts: int = Field(8, ge=1)
    group: int = Field(16, ge=1)
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch of rollouts, each on its own part of the groups. From the second step on the policy
    differs from the one before the batch, so `clip_low` and `clip_high` act; with 1 they never do on fresh rollouts."""
    spread_groups: bool = False
    """With several minibatches, spread the rollouts of each prompt over all of them (§4.2.5), instead of keeping groups
    whole."""
    max_tokens: int = Field(48, ge=1)
    max_turns: int = Field(4, ge=1)
    max_context: int = Field(512, ge=2)
    env_seconds: float = Field(300.0, gt=0)
    """An environment that takes longer for one start or step counts as failed."""
    env_error_share: float = Field(0.5, ge=0, lt=1)
    """The stage ends if more than this share of a family's last `env_error_window` episodes failed in their
    environment."""
    env_error_window: int = Field(64, ge=1)
    temperature: float = Field(1.0, gt=0)
    row_length: int = Field(256, ge=2)
    beta: float = Field(2.0, ge=1)
    clip_low: float = Field(0.2, ge=0, le=1)
    clip_high: float = Field(0.28, ge=0)
    rollouts: Literal["exact", "fast"] = "exact"
    """Numerics of the engine. "exact": the learner's own functions, so both give equal log-probabilities, with MLA bit
    for bit. "fast": fast functions in `rollout_dtype`; the loss must handle the mismatch."""
    rollout_dtype: Literal["float32", "bfloat16", "int8", "fp8"] = "float32"
    """Besides types of all numbers: "int8", bf16 with layers that multiply int8 (W8A8), and "fp8", bf16 with weights
    and activations rounded to FP8 blocks: the numbers of FP8 engines, at the speed of bf16 or less."""
    record: bool = False
    """Write every batch of rollouts to `rollouts.jsonl` beside the metrics; its update can be repeated from there."""
    max_staleness: int = Field(0, ge=0)
    """Maximum age of a sampled token, in versions of the learner's weights; 0 is synchronous RL."""
    push_every: int = Field(1, ge=1)
    """Updates between weight pushes."""
    reset_optimizer: bool = False
    """Whether every push resets the optimizer state."""
    concurrency: int | None = Field(None, ge=1)
    """Maximum rollouts in flight; None: `prompts` x `group`."""
    train_ticks: int = Field(0, ge=0)
    """Engine steps on the logical clock per update."""
    env_ticks: int = Field(0, ge=0)
    """Environments answer at multiples of this many engine steps, at least one interval after the request."""

    @property
    def engine_dtype(self) -> str:
        """Of the engine's weights and cache."""
        return "float32" if self.rollout_dtype == "float32" else "bfloat16"

    @property
    def engine_rounding(self) -> str | None:
        """The `quantize` of the engine."""
        return self.rollout_dtype if self.rollout_dtype in ("int8", "fp8") else None

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.rollouts == "exact" and self.rollout_dtype != "float32":
            raise ValueError(f'{self.name}: rollout_dtype = "{self.rollout_dtype}" needs rollouts = "fast"')
        if self.minibatches > self.prompts and not self.spread_groups:
            raise ValueError(f"{self.name}: minibatches = {self.minibatches} is more than prompts = {self.prompts}")
        if self.push_every > self.max_staleness + 1:
            raise ValueError(
                f"{self.name}: push_every = {self.push_every} leaves the learner without fresh rollouts; it can be at "
                f"most max_staleness + 1 = {self.max_staleness + 1}"
            )
        return self


class RewardStage(PolicyStage):
    """Common to stages that learn from rewards. `clip_low` and `clip_high` are the bounds of PPO and Eq. 1."""

    loss: str
    """A name in the register of losses (`glm5/rl/losses/registered.py`): "icepop" (Eq. 1), "grpo" (Eq. 1 without pop),
    "double_sided" (Eqs. 3-5), "ppo", "policy_gradient", or one that other code adds."""
    loss_options: dict[str, Any] = {}
    """Options of a loss that has no keys of its own here."""
    eps_low: float = Field(0.5, ge=0)
    eps_high: float = Field(1.0, ge=0)
    """"double_sided" leaves out tokens if their ratio is not between 1 - `eps_low` and 1 + `eps_high`."""
    average: Literal["sequence", "token"] = "sequence"
    """The loss is a mean over sequences, which all count alike (Eq. 1), or over tokens (Eq. 5)."""
    normalize: Literal["group", "per_reward"] = "group"
    """"group": advantages from each sample's reward, as the algorithm computes them. "per_reward": for families that
    give several named rewards, each normalised within its group, added with `reward_weights`, and scaled over the
    batch."""
    reward_weights: dict[str, float] = {}
    """Of "per_reward", by name; 1 for names that are not listed, 0 leaves a reward out."""
    drop_trivial: float = Field(0.0, ge=0, lt=1)
    """Probability with which a sample that its environment calls trivial is not trained on (§4.2.5)."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of a penalty for distance from the stage's starting weights; the paper has none."""
    kl_estimator: Literal["k2", "k3"] = "k3"


class ReasoningStage(RewardStage):
    """Reasoning RL: group-normalised advantages, the IcePop loss (Eq. 1), on-policy (§3.2)."""

    kind: Literal["reasoning"]
    algorithm: str = "reasoning"
    loss: str = "icepop"


class AgenticStage(RewardStage):
    """Agentic RL: multi-turn, double-sided importance sampling (§3.3, §4.1). Its asynchrony is simulated: engine and
    learner take turns, and a logical clock decides which rollouts see which weights."""

    kind: Literal["agentic"]
    algorithm: str = "agentic"
    loss: str = "double_sided"
    average: Literal["sequence", "token"] = "token"
    max_staleness: int = Field(4, ge=0)
    reset_optimizer: bool = True
    """As in the paper (§4.1)."""
    concurrency: int | None = Field(64, ge=1)
    train_ticks: int = Field(24, ge=0)
    env_ticks: int = Field(4, ge=0)


class GeneralStage(RewardStage):
    """General RL: rules, an outcome reward model and a judge, mixed by class of prompt; Eq. 1 loss (§3.4)."""

    kind: Literal["general"]
    algorithm: str = "general"
    loss: str = "icepop"
    reward_model: RewardModelConfig | None = None
    """The outcome reward model (ORM)."""
    judge: JudgeConfig | None = None
    """The generative reward model (GRM)."""
    mix: dict[str, RewardMix] = {}
    """Weights by class of prompt ("emotion/listen"), dimension ("emotion"), family ("assistant") or "default"; the most
    special name counts. Without a "default", the models of the stage weigh alike, behind the gate of the rules."""
    scale: Literal["sigmoid", "minmax"] = "sigmoid"
    """How scores become rewards in [0, 1]: by the sigmoid of the calibrated score, or from the least to the greatest of
    a group. The judge's are in [0, 1] and "sigmoid" leaves them."""

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.reward_model is None and self.judge is None:
            raise ValueError(f"{self.name}: General RL needs a `reward_model`, a `judge` or both")
        missing = {"orm": self.reward_model, "grm": self.judge}
        for name, mix in self.mix.items():
            for part, model in missing.items():
                if getattr(mix, part) and model is None:
                    section = "reward_model" if part == "orm" else "judge"
                    raise ValueError(f"{self.name}: mix.{name}.{part} has a weight, and the stage has no `{section}`")
        return self


class DistillStage(PolicyStage):
    """On-policy cross-stage distillation (§3.5): every prompt has one teacher, that of its family.

    A teacher is the name of an earlier stage (its final checkpoint), "start" (the run's initial model) or the path of a
    checkpoint directory, recognised by its slash.
    """

    kind: Literal["distill"]
    algorithm: str = "distill"
    group: int = Field(1, ge=1)
    teachers: dict[str, str] = {}
    """Family name -> its teacher; the short form of the family's `teacher`."""
    keep_teachers: bool = True
    """Keep teachers in memory after first use. Otherwise they are read for every update, one at a time."""

    def teacher_of(self, family: FamilyConfig) -> str | None:
        """The teacher of a family's prompts in this stage."""
        return family.teacher or self.teachers.get(family.name)


STAGES: Register[Stage] = Register(
    "glm5.stages",
    "stage kind",
    Stage,
    {
        "tokenizer": TokenizerStage,
        "pretrain": PretrainStage,
        "midtrain": PretrainStage,
        "dsa_warmup": DsaStage,
        "dsa_sparse": DsaStage,
        "sft": SftStage,
        "reasoning": ReasoningStage,
        "agentic": AgenticStage,
        "general": GeneralStage,
        "distill": DistillStage,
    },
)
"""The register of stage kinds. Add your own, a `glm5.launch.stages.CustomStage`, with `STAGES.add` or an entry point in
"glm5.stages"."""


GIVE_PAIRS = ("general", "assistant")
"""Task families that give preference pairs."""


class RunRecipe(Frozen):
    """A run: a chain of stages over one model. It starts from the checkpoint directory `start` (its config and
    tokenizer win), or from random weights of `preset` with `model` overrides."""

    name: str
    seed: int = 0
    runs: str = "runs"
    start: str | None = None
    data: str | dict[str, str] | None = None
    """Shards made by `glm5 data build`, for runs without a tokenizer stage. If there are several they have names, which
    `corpus.weights` of a stage uses."""
    tokenizer: str | None = None
    """Tokenizer directory, for runs that neither train a tokenizer nor start from a checkpoint that has one."""
    preset: str = "nano"
    model: dict[str, Any] = {}
    template: str = "5.0"
    """Chat template version of a tokenizer that the run trains."""
    sinks: list[Literal["tensorboard", "wandb"]] = []
    """Metrics sinks in addition to `metrics.jsonl`; each needs the extra of its name."""
    wandb_mode: Literal["online", "offline"] | None = None
    """None means offline, unless the environment sets WANDB_MODE."""
    final: str | None = None
    """Folder of the last checkpoint; default `runs/NAME/final`."""
    evaluation: EvalConfig | None = None
    parallel: Layout = Layout()
    """How processes started by torchrun divide the work; it may differ when a run is resumed."""
    launch: Launch | None = None
    """Processes of live RL; None simulates asynchrony in this process."""
    stages: list[Annotated[Stage, ByKind(STAGES)]]

    @model_validator(mode="before")
    @classmethod
    def _write_out_presets(cls, values: Any) -> Any:
        """A stage with `preset = "midtrain_32k"` becomes that preset, scaled to this run; its own keys win."""
        return expand(values) if isinstance(values, dict) else values

    @field_validator("stages")
    @classmethod
    def _names_fit(cls, stages: list[Stage], info: ValidationInfo) -> list[Stage]:
        """Check now, not after hours: names differ, teachers are known and come first, families suit their stage."""
        names = {"start"} if info.data.get("start") else set()
        teachers = set(names)
        for stage in stages:
            if stage.name in names:
                raise ValueError(f'two stages are named "{stage.name}"')
            _check_families(stage)
            if isinstance(stage, DistillStage):
                _check_teachers(stage, teachers)
            if isinstance(stage, GeneralStage):
                _check_judge(stage, teachers)
            names.add(stage.name)
            if not isinstance(stage, TokenizerStage):
                teachers.add(stage.name)
        return stages


def is_path(teacher: str) -> bool:
    """Whether a teacher's name is a directory; names of stages have no slash."""
    return "/" in teacher


def _check_families(stage: Stage) -> None:
    """Raise ValueError for families that a stage of this kind cannot train on."""
    families: list[FamilyConfig] = getattr(stage, "families", [])
    if isinstance(stage, PolicyStage) and not families:
        raise ValueError(f"{stage.name} has no families, so there is nothing to roll out; list at least one")
    if families and not any(family.weight for family in families):
        raise ValueError(f"{stage.name}: all weights of families are 0, so no problem can be drawn; set one above 0")
    model = stage.reward_model if isinstance(stage, GeneralStage) else None
    if model is not None and model.kind == "learned" and model.preferences is None:
        if not any(family.name in GIVE_PAIRS for family in families):
            raise ValueError(
                f'{stage.name} needs the family "general" or "assistant", which its reward model is trained on, or '
                "reward_model.preferences"
            )
    for family in families:
        if family.difficulty is not None and not isinstance(stage, PolicyStage):
            raise ValueError(
                f"{stage.name} has no rollouts to measure difficulty; remove `difficulty` from {family.name}"
            )
        if family.teacher is not None and not isinstance(stage, DistillStage):
            raise ValueError(
                f'only stages of kind "distill" have teachers; remove `teacher` from {family.name} in {stage.name}'
            )


def _check_judge(stage: GeneralStage, known: Collection[str]) -> None:
    """Raise ValueError for a judge that is neither a server, nor a path, nor one of the known names."""
    judge = stage.judge
    if judge is not None and not (judge.remote or is_path(judge.model) or judge.model in known):
        raise ValueError(
            f'{stage.name}: judge.model = "{judge.model}" is neither the URL of a server, nor a path with a slash, nor '
            'an earlier stage, nor "start" in a run that has a `start`' + nearest(judge.model, known)
        )


def _check_teachers(stage: DistillStage, known: Collection[str]) -> None:
    """Raise ValueError for a family's teacher that is neither one of the known names nor a path."""
    for family in stage.families:
        teacher = stage.teacher_of(family)
        if teacher is None or not (is_path(teacher) or teacher in known):
            raise ValueError(
                f"{stage.name} has no teacher for {family.name}: set teachers.{family.name} to an earlier stage, to "
                f'"start" in a run that has a `start`, or to a path with a slash, not to {teacher!r}'
                + nearest(teacher or "", known)
            )
