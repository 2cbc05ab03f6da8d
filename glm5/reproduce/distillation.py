"""On-policy cross-stage distillation (§3.5): recover skills that a later stage lost, keep those that it taught."""

from __future__ import annotations

from glm5.reproduce import policy, reasoning
from glm5.reproduce.plan import Experiment, Figure, Outcome, Question, Sizes, Variant, Work
from glm5.reproduce.worker import read_run, run_folder
from glm5.rl.algos.distill import Distillation, ModelTeacher

EARLY, LATE = reasoning.DOMAINS


def sizes(quick: bool, steps: int | None) -> Sizes:
    """The start has both skills; the later stage continues with one of them. Updates use one sample per prompt, as in
    the paper."""
    return reasoning.two_domains(quick, steps or (2 if quick else 32)) | {
        "later_steps": 2 if quick else 60,
        "problems": 4 if quick else 1000,
        "prompts": 8 if quick else 256,
        "group": 1,
        "sampled_problems": 2 if quick else 250,
    }


def run(work: Work) -> Outcome:
    """The first stage, the later one, or distillation of both into the later one."""
    s = work.sizes
    if work.variant == "first":
        return policy.outcome(work, policy.prepare(work, ("pretrain", "sft")), [])
    model = work.model()
    if work.variant == "later":
        policy.tune(work, model, s["later_steps"], 3e-3, 1e-3, policy.families(s)[1:], "later")
        return policy.outcome(work, policy.keep(work, model), [])
    assert work.start is not None
    folders = [run_folder(work.runs, "first", work.seed) / "model", work.start]
    first, later = map(str, folders)
    stage = policy.stage_of(s, "distill", name="distill", teachers={EARLY: first, LATE: later})
    teachers = {
        str(folder): ModelTeacher(folder, s["row_length"], exact=False, device=model.device) for folder in folders
    }
    rows = policy.learn(work, model, stage, "distill", algorithm=Distillation(stage, teachers))
    found = policy.outcome(work, model, rows)
    before, lost = (_score(work, variant) for variant in ("first", "later"))
    now = found.metrics[f"{EARLY}_solved"]
    found.metrics["came_back"] = (now - lost) / (before - lost) if before > lost else 0.0
    return found


def _score(work: Work, variant: str) -> float:
    run = read_run(work.runs, variant, work.seed)
    assert run is not None, "variants wait for what they continue"
    return float(run["metrics"][f"{EARLY}_solved"])


EXPERIMENT = Experiment(
    name="distillation",
    title="On-policy cross-stage distillation",
    section="§3.5, Eq. 2",
    claim="A skill that a later stage cost comes back by on-policy distillation, and what that stage taught stays.",
    variants=(
        Variant("first", "first stage"),
        Variant("later", "later stage", after="first"),
        Variant("distilled", "distilled", after="later"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question(f"The later stage costs {EARLY}", f"{EARLY}_solved", "later", "first", "lower"),
        Question(f"Distillation brings {EARLY} back", f"{EARLY}_solved", "distilled", "later", "higher", main=True),
        Question("It brings back all of it (within 10 %)", f"{EARLY}_solved", "distilled", "first", "equal", 0.1),
        Question(
            "What the later stage taught stays (within 3 %)",
            f"{LATE}_solved",
            "distilled",
            "later",
            "equal",
            0.03,
            main=True,
        ),
    ),
    figures=(
        Figure("reverse-kl", "KL of student and teachers", "nats per token", curve="reverse_kl"),
        policy.SOLVED,
    ),
    labels={
        **policy.task_labels(reasoning.DOMAINS),
        "came_back": f"share of what {EARLY} had lost that came back",
        "end_reverse_kl": "KL of student and teachers at the end",
    },
    limits=(
        "The later stage is fine-tuning on its own skill alone, which forgets more than the paper's stages would.",
        "The paper gives no numbers for distillation.",
    ),
)
