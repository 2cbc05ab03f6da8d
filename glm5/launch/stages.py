"""One function per stage kind: checkpoint in, checkpoint out."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from glm5.chat import Tokenizer, render_chat
from glm5.config.evaluation import EvalConfig
from glm5.config.model import GLM5Config
from glm5.config.recipe import (
    DistillStage,
    DsaStage,
    GeneralStage,
    PolicyStage,
    PretrainStage,
    RunRecipe,
    SftStage,
    Stage,
    TokenizerStage,
    is_path,
)
from glm5.data.dedup import distinct
from glm5.data.shards import Shard, build_shards, open_shard
from glm5.data.sources import Document, read_sources
from glm5.errors import ConfigError, DataError
from glm5.eval.probe import Probe
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.parallel.ranks import Ranks
from glm5.rl.algos import stage_algorithm
from glm5.rl.drivers.common import Driver
from glm5.rl.drivers.logical import LogicalDriver
from glm5.rl.learner import Agreement
from glm5.rl.start import StageStart
from glm5.tasks import make_family
from glm5.train import dsa_adapt, pretrain, sft
from glm5.train.dsa_adapt import HeldOut
from glm5.train.loop import StageIO

_log = get_logger(__name__)

CORPUS = "corpus"
"""Name of the only corpus of a run."""
DONE = "stage.json"
"""In the folder of a finished stage."""


@dataclass
class RunState:
    """State passed from stage to stage. `data` names shard folders, `checkpoints` maps finished stages to their
    checkpoint directories. With several ranks, `model` is deferred between stages (`GLM5ForCausalLM.deferred`): it has
    a configuration and knows where its weights are, but no rank holds them."""

    recipe: RunRecipe
    model: GLM5ForCausalLM | None = None
    tokenizer: Tokenizer | None = None
    data: dict[str, Path] = field(default_factory=dict)
    checkpoints: dict[str, Path] = field(default_factory=dict)
    agreement: dict[str, Agreement] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.recipe.name}: no tokenizer. "
                'Begin with a stage of kind "tokenizer", or set `tokenizer` or `start`.'
            )
        return self.tokenizer

    def need_model(self) -> GLM5ForCausalLM:
        """The current model. Before the first training stage it comes from the preset, its indexers not yet adapted."""
        if self.model is None:
            tokenizer = self.need_tokenizer()
            recipe = self.recipe
            values = {"vocab_size": tokenizer.vocab_size, **recipe.model}
            ends = {"eos_token_id": tokenizer.stop_token_ids, "pad_token_id": tokenizer.pad_token_id}
            config = GLM5Config.preset(recipe.preset, **values, **ends)
            if config.use_dsa:
                config = config.replace(indexer_adapted=False)
            self.model = self.ranks.fresh(config, recipe.seed)
        return self.model

    def shards(self, split: str) -> dict[str, Shard]:
        """One split of every corpus; their hashes were checked at the start of the run."""
        if not self.data:
            raise ConfigError(
                f'{self.recipe.name}: no token shards. Begin with a stage of kind "tokenizer", or set `data`.'
            )
        return {name: open_shard(path, split, self.tokenizer, verify=False) for name, path in self.data.items()}

    def held_out(self) -> Shard | None:
        """The held-out text on which the run is scored: that of the first corpus, or None."""
        shard = next(iter(self.shards("held_out").values())) if self.data else None
        return shard if shard is not None and len(shard) else None


class CustomStage(Stage):
    """Base class of your own stage kinds. The fields of a subclass are its keys in the recipe. Add it with
    `glm5.config.recipe.STAGES.add` or an entry point in "glm5.stages". It runs in one process."""

    @abstractmethod
    def run(self, state: RunState, io: StageIO) -> dict[str, float]:
        """Change or replace `state.model`; returns finite numbers for the results.

        Afterwards the pipeline saves and evaluates the model, and nothing else of `state`: a resumed run would not have
        another tokenizer or other data. An interrupted stage starts again from the model before it; keep what it should
        resume from in `io.folder`.
        """

    @property
    def units(self) -> int:
        """Number of units of progress that the stage reports to `io.advance`."""
        return 1


def run_stage(state: RunState, stage: Stage, io: StageIO) -> dict[str, float]:
    """Run one stage in place on `state`; returns its final numbers."""
    return runner_of(stage)(state, stage, io)


def runner_of(stage: Stage) -> Callable[..., dict[str, float]]:
    """The function that runs a stage. Raises ConfigError for a class that is neither built in nor a `CustomStage`."""
    for kind, runner in _RUNNERS.items():
        if isinstance(stage, kind):
            return runner
    raise ConfigError(
        f'{stage.name}: {type(stage).__qualname__}, the class of the stage kind "{stage.kind}", has no `run`; derive '
        "it from CustomStage."
    )


def _custom(state: RunState, stage: CustomStage, io: StageIO) -> dict[str, float]:
    numbers = stage.run(state, io)
    try:
        numbers = {str(name): float(number) for name, number in numbers.items()}
    except (AttributeError, TypeError, ValueError):
        numbers = {"": math.nan}
    if not all(map(math.isfinite, numbers.values())):
        raise DataError(f"{stage.name}: {type(stage).__qualname__}.run must return a dict of finite numbers.")
    return numbers


def _tokenizer(state: RunState, stage: TokenizerStage, io: StageIO) -> dict[str, float]:
    numbers = io.ranks.on_main(lambda: _build_tokenizer(state, stage, io))
    if not io.ranks.main:
        state.tokenizer, state.data = Tokenizer.load(io.folder / "tokenizer"), {CORPUS: io.folder / "data"}
    return numbers


def _build_tokenizer(state: RunState, stage: TokenizerStage, io: StageIO) -> dict[str, float]:
    documents = read_sources(stage.sources)
    if stage.dedup:
        documents = distinct(documents)
    kept = sorted((d for d in documents if not d.held_out), key=_by_hash)
    total, chosen = 0, []
    for document in kept:
        if total >= stage.max_bytes:
            break
        chosen.append(document)
        total += len(document.text.encode())
    held_out = sorted((d for d in documents if d.held_out), key=_by_hash)
    io.advance(1, {"documents": float(len(chosen)), "megabytes": total / 1e6})
    texts = [document.text for document in chosen] + _chat_texts(state.recipe)
    state.tokenizer = Tokenizer.train(texts, stage.vocab_size, template_version=state.recipe.template)
    state.tokenizer.save(io.folder / "tokenizer")
    io.advance(1, {"vocab": float(state.tokenizer.vocab_size)})
    state.data = {CORPUS: io.folder / "data"}
    counts = build_shards(chosen + held_out, state.tokenizer, state.data[CORPUS], stage.sources)
    io.advance(1, {})
    return {**{k: float(v) for k, v in counts.items()}, "tokenizer_vocab": float(state.tokenizer.vocab_size)}


def _by_hash(document: Document) -> str:
    return hashlib.sha256(document.path.encode()).hexdigest()


def _chat_texts(recipe: RunRecipe, per_family: int = 200) -> list[str]:
    """Conversations as the template writes them, to teach the tokenizer the words of prompts and tool blocks."""
    plain = Tokenizer.byte_level(recipe.template)
    texts = []
    for stage in recipe.stages:
        if not isinstance(stage, SftStage):
            continue
        for config in stage.families:
            family = make_family(config.name, **config.options)
            for index in range(per_family):
                problem = family.problem("train", index)
                tools = problem.tools if config.render_tools and problem.tools else None
                ids = render_chat(problem.demonstration(index), tools, tokenizer=plain, clear_thinking=False).ids
                texts.append(plain.decode(ids, skip_special=True))
    return texts


def _pretrain(state: RunState, stage: PretrainStage, io: StageIO) -> dict[str, float]:
    """Pre-training and mid-training keep the model's form of attention, but never select keys by untrained indexers
    (§2.1.1)."""
    model = state.need_model()
    changes: dict[str, Any] = {}
    if model.config.selects_keys and dsa_adapt.untrained_indexers(model):
        _log.warning(
            "%s: the indexers of this checkpoint were never trained, so attention is dense until a stage of kind "
            "dsa_warmup or dsa_sparse trains them.",
            stage.name,
        )
        changes["indexer_adapted"] = False
    if stage.rope_theta is not None:
        changes["rope_theta"] = stage.rope_theta
    if stage.max_position_embeddings is not None:
        changes["max_position_embeddings"] = stage.max_position_embeddings
    if changes:
        model = state.model = model.clone(model.config.replace(**changes))
    tokenizer, held_out, config = state.need_tokenizer(), state.held_out(), state.recipe.evaluation
    probe = None
    if held_out is not None and stage.optim.evaluate_every:
        folder = io.folder if io.ranks.world == 1 else None
        size = config.text_bytes if config is not None else EvalConfig().text_bytes
        probe = Probe(held_out, tokenizer, stage.row_length, size, folder)
    return pretrain.run(model, stage, state.shards("train"), tokenizer, io, state.recipe.seed, probe)


def _dsa(state: RunState, stage: DsaStage, io: StageIO) -> dict[str, float]:
    model = state.need_model()
    if not model.config.selects_keys and stage.kind == "dsa_sparse" and not stage.indexer_weight:
        raise ConfigError(
            f"{stage.name}: indexer_weight = 0 leaves untrained indexers as they are, so attention would select keys "
            "at random; give it a weight, or put a stage of kind dsa_warmup before this one."
        )
    if not model.config.use_dsa:
        preset = GLM5Config.preset(state.recipe.preset)
        topk = state.recipe.model.get("index_topk") or preset.index_topk
        if not topk:
            raise ConfigError(f"{stage.name}: set model.index_topk; the preset has no sparse attention.")
        sizes = {"heads": state.recipe.model.get("index_n_heads"), "dim": state.recipe.model.get("index_head_dim")}
        model = state.model = dsa_adapt.add_indexer(model, state.recipe.seed, int(topk), **sizes)
    elif not model.config.indexer_adapted:
        model = state.model = model.clone(model.config.replace(indexer_adapted=True))
    losses: dict[str, float] = {}
    rows = _rows_of_sharing(state, stage, io)
    if rows is not None:
        losses["held_out_loss_full"] = dsa_adapt.loss_beyond(model, rows)
    if stage.share_indexers is not None:
        model = state.model = dsa_adapt.share_indexers(model, stage.share_indexers)
    if rows is not None:
        losses["held_out_loss_dropped"] = dsa_adapt.loss_beyond(model, rows)
    numbers = dsa_adapt.run(model, stage, state.shards("train"), state.need_tokenizer(), io, state.recipe.seed)
    if rows is not None:
        losses["held_out_loss_shared"] = dsa_adapt.loss_beyond(model, rows)
    return numbers | losses


def _rows_of_sharing(state: RunState, stage: DsaStage, io: StageIO) -> HeldOut | None:
    """Held-out rows for what dropping indexers costs and training gains back, if one process has the whole model."""
    held_out, topk = state.held_out(), state.need_model().config.index_topk or 0
    if stage.share_indexers is None or io.ranks.world > 1 or held_out is None or stage.row_length <= topk:
        return None
    if len(held_out.tokens) < stage.row_length:
        return None
    return dsa_adapt.held_out_rows(held_out, stage.row_length, dsa_adapt.FEW_TOKENS)


def _sft(state: RunState, stage: SftStage, io: StageIO) -> dict[str, float]:
    seed = state.recipe.seed
    shards = state.shards("train") if stage.text_share else None
    return sft.run(state.need_model(), stage, state.need_tokenizer(), io, seed, shards)


def _policy(state: RunState, stage: PolicyStage, io: StageIO) -> dict[str, float]:
    model, tokenizer = state.need_model(), state.need_tokenizer()
    algorithm = stage_algorithm(stage)
    teacher, judge = partial(_teacher_folder, state, stage), partial(_checkpoint_folder, state, stage, "judge")
    prepared = algorithm.prepare(StageStart(model, tokenizer, io, teacher, judge))
    driver: Driver
    if state.recipe.launch is None:
        driver = LogicalDriver(model, tokenizer, stage, algorithm, io, state.recipe.seed)
    else:
        from glm5.rl.drivers.live import LiveDriver

        driver = LiveDriver(model, tokenizer, stage, algorithm, io, state.recipe.seed, state.recipe.launch)
    numbers = driver.run()
    if stage.rollouts == "exact":
        state.agreement[stage.name] = driver.learner.agreement
    model.requires_grad_(True)
    return numbers | prepared


def check_inputs(state: RunState, folders: Mapping[str, Path]) -> None:
    """Raise now what stages would otherwise find only when they begin: a directory of a teacher or a judge that is no
    checkpoint, a teacher with another tokenizer than the run (if that is known yet), votes and human answers that
    cannot be read. `folders` are those of the stages by name; a finished stage needs no input."""
    for stage in state.recipe.stages:
        if isinstance(stage, DistillStage):
            for family in stage.families:
                if is_path(name := stage.teacher_of(family) or ""):
                    _teacher_folder(state, stage, name)
        if isinstance(stage, PolicyStage) and not (folders[stage.name] / DONE).exists():
            judge = stage.judge if isinstance(stage, GeneralStage) else None
            if judge is not None and not judge.remote and is_path(judge.model):
                _checkpoint_folder(state, stage, "judge", judge.model)
            stage_algorithm(stage).check(folders[stage.name])


def _teacher_folder(state: RunState, stage: PolicyStage, name: str) -> Path:
    """The checkpoint of a teacher. Equal ids must mean equal text, or its probabilities are for another text."""
    folder = _checkpoint_folder(state, stage, "teacher", name)
    if not is_path(name):
        return folder
    if state.tokenizer is not None and Tokenizer.load(folder).hash() != state.tokenizer.hash():
        raise ConfigError(
            f"{stage.name}: the teacher {folder} has another tokenizer than this run, so its probabilities are of "
            "other texts; choose a teacher that was trained with the run's tokenizer."
        )
    return folder


def _checkpoint_folder(state: RunState, stage: PolicyStage, what: str, name: str) -> Path:
    """The checkpoint of a teacher or a judge, by the name of an earlier stage, "start" or a path."""
    if not is_path(name):
        if name not in state.checkpoints:
            raise ConfigError(f'{stage.name}: there is no checkpoint of a stage "{name}" yet.')
        return state.checkpoints[name]
    folder = Path(name)
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).exists()]
    if missing:
        raise ConfigError(
            f"{stage.name}: the {what} {folder} has no {missing[0]}; give a checkpoint directory with a tokenizer."
        )
    return folder


_RUNNERS: dict[type[Stage], Callable[..., dict[str, float]]] = {
    CustomStage: _custom,
    TokenizerStage: _tokenizer,
    PretrainStage: _pretrain,
    DsaStage: _dsa,
    SftStage: _sft,
    PolicyStage: _policy,
}


def units(stage: Stage) -> int:
    """How many progress units a stage reports."""
    if isinstance(stage, TokenizerStage):
        return 3
    if isinstance(stage, CustomStage):
        return stage.units
    return getattr(stage, "optim").steps  # noqa: B009 - every other kind has an optimizer
