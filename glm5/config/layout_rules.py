"""Why a job refuses a layout, before any process starts. `glm5 plan` and the trainer ask the same functions.

Rules are of the processes alone, of the model that they divide, or of the stage that trains it. Each function gives a
sentence per problem; `refuse` raises the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from glm5.config.keep_plan import MODES
from glm5.config.launch import Launch
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.config.recipe import DsaStage, GeneralStage, GradientStage, PolicyStage, RunRecipe, Stage, TokenizerStage
from glm5.config.step_memory import spans_of
from glm5.config.trained_models import trained_models
from glm5.errors import ConfigError

NO_INDEXER = (
    "Layer {} shares the indexer of an earlier pipeline stage. The loss of an indexer needs all layers that use it in "
    "one stage: set parallel.pp_layers so that each stage begins with a layer that has an indexer."
)


def refuse(problems: Iterable[str]) -> None:
    """Raises ConfigError for the first problem, if there is one."""
    for problem in problems:
        raise ConfigError(problem)


def job_problems(layout: Layout, world: int, node: int | None = None) -> Iterator[str]:
    """Of a job of `world` processes, `node` on each machine (None: all on one)."""
    stage = world // layout.pp
    for name, size, whole in (("pp", layout.pp, world), ("ep", layout.ep, stage), ("cp", layout.cp, stage)):
        if whole % size or not whole:
            yield (
                f"parallel.{name} = {size} does not divide the {whole} process{'es' if whole > 1 else ''} of "
                f"{'this job' if name == 'pp' or layout.pp == 1 else 'a pipeline stage'}; choose a divisor, or start "
                "another number with torchrun --nproc-per-node."
            )
            if name == "pp":
                return
    if node is not None and layout.cp > node and layout.cp % node:
        yield (
            f"parallel.cp = {layout.cp} is more than the {node} processes of a node, but not a multiple; choose one."
        )
    if layout.pp == 1 and (layout.pp_stages_per_rank > 1 or layout.pp_layers or layout.pp_deferred):
        yield (
            "parallel.pp_stages_per_rank, pp_layers and pp_deferred are for pipeline stages; set parallel.pp above 1, "
            "or remove them."
        )


def model_problems(layout: Layout, config: GLM5Config) -> Iterator[str]:
    """Of dividing a model."""
    if config.n_routed_experts % layout.ep:
        yield (
            f"parallel.ep = {layout.ep} does not divide the {config.n_routed_experts} experts of a layer; choose a "
            "divisor."
        )
    if layout.cp > 1 and config.has_recurrent_layers:
        yield (
            f"parallel.cp = {layout.cp} cannot divide a recurrence over tokens (Gated DeltaNet, SimpleGDN); train this "
            "model with parallel.cp = 1."
        )


def tp_problems(config: GLM5Config, tp: int) -> Iterator[str]:
    """Of an engine that divides a model over `tp` devices."""
    if tp > 1 and config.has_recurrent_layers:
        yield (
            "Tensor parallelism does not divide layers with a recurrent state (Gated DeltaNet, SimpleGDN); serve this "
            "model with --tp 1."
        )
    layers = range(config.num_hidden_layers)
    sizes = {"num_attention_heads": config.num_attention_heads}
    if config.attention_type == "gqa":
        sizes["num_key_value_heads"] = config.num_key_value_heads
    if any(config.is_dense_layer(layer) for layer in layers):
        sizes["intermediate_size"] = config.intermediate_size
    if config.num_nextn_predict_layers or not all(config.is_dense_layer(layer) for layer in layers):
        sizes["n_routed_experts"] = config.n_routed_experts
        sizes["moe_intermediate_size * n_shared_experts"] = config.moe_intermediate_size * config.n_shared_experts
    for key, size in sizes.items():
        if size % tp:
            yield f"--tp {tp} does not divide this model: its {key} is {size}; choose a divisor of it."


def stage_problems(stage: Stage, layout: Layout, world: int, launch: Launch | None) -> Iterator[str]:
    """Of what a stage can do, whatever its model."""
    kind = f"{stage.name}: stages of kind {stage.kind}"
    if isinstance(stage, PolicyStage):
        if layout.pp > 1 or layout.cp > 1:
            given = " and ".join(f"parallel.{k} = {v}" for k, v in (("pp", layout.pp), ("cp", layout.cp)) if v > 1)
            yield (
                f"{kind} divide neither layers nor rows ({given}); run this stage with parallel.pp = 1 and "
                "parallel.cp = 1, which may resume the run."
            )
        if isinstance(stage, GeneralStage) and launch is not None and launch.history == "text":
            yield f'{stage.name}: General RL scores whole answers, which launch.history = "text" splits.'
    elif world > 1 and not isinstance(stage, GradientStage | TokenizerStage):
        yield (
            f"{kind} run in one process, and this job has {world}; run the stages before it with torchrun, and this "
            "one without."
        )
    if layout.pp > 1 and isinstance(stage, GradientStage) and stage.compile:
        yield f"{stage.name}: compile = true does not work with parallel.pp above 1; remove one of them."


def span_problems(stage: Stage, config: GLM5Config, layout: Layout) -> Iterator[str]:
    """Of the pipeline stages in which a stage trains its model."""
    if layout.pp == 1 or not isinstance(stage, GradientStage):
        return
    try:
        spans = spans_of(config, layout.pp * layout.pp_stages_per_rank, tuple(layout.pp_layers))
    except ConfigError as error:
        yield str(error)
        return
    for span in spans:
        if isinstance(stage, DsaStage) and span.takes_indices:
            yield f"{stage.name}: {NO_INDEXER.format(span.layers.start)}"
            return


def recompute_problems(stage: Stage, config: GLM5Config) -> Iterator[str]:
    """Of a list of settings, which needs one for each layer, and of "auto", which needs to know each layer's bytes."""
    recompute = getattr(stage, "recompute", False)
    if recompute == "auto" and config.has_recurrent_layers:
        yield (
            f'{stage.name}: recompute = "auto" needs a prediction of memory, and there is none for recurrent layers '
            '(Gated DeltaNet, SimpleGDN); set true, false or "selective".'
        )
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    if isinstance(recompute, tuple) and len(recompute) != layers:
        yield (
            f"{stage.name}: recompute has {len(recompute)} settings, and the model has {layers} layers (the MTP layer "
            "is the last); give one for each, or one for all."
        )


def training_problems(stage: Stage, config: GLM5Config, layout: Layout) -> Iterator[str]:
    """Of training `config` in a stage."""
    yield from model_problems(layout, config)
    yield from span_problems(stage, config, layout)
    yield from recompute_problems(stage, config)


def check_run(recipe: RunRecipe, world: int, node: int | None = None) -> None:
    """Raises ConfigError for what a job of `world` processes refuses of a recipe."""
    layout = recipe.parallel
    refuse(job_problems(layout, world, node))
    for stage in recipe.stages:
        refuse(stage_problems(stage, layout, world, recipe.launch))
    by_layer = any(
        getattr(stage, "share_indexers", None) is not None or getattr(stage, "recompute", False) not in MODES
        for stage in recipe.stages
    )
    if layout == Layout() and not by_layer:
        return  # no rule asks for the model, which may be one that only the run knows
    for stage, config in trained_models(recipe):
        refuse(training_problems(stage, config, layout))


def node_of(gpus: int, node: int) -> int:
    """Processes on each machine if `gpus` run on as few machines of `node` devices as can have equal numbers."""
    return max(n for n in range(1, min(gpus, node) + 1) if gpus % n == 0)
