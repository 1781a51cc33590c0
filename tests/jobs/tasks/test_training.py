"""Each task trains without Ray: what one process does, two do, interrupted or not; its export is what was validated.

What the loop does for every task alike is proved in tests/jobs/engine/test_loop.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from support import tiny_config, tiny_options, with_sections
from task_support import sample_states, tiny_clip_config, tiny_sentences, write_smooth_tower
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from jobs.engine.launch import make_plan
from jobs.engine.worker import worker_environment
from jobs.tasks.image_encoder.task import probe_accuracy
from jobs.tasks.images import prepare_split
from jobs.tasks.language_model.models import find_divisible_base
from jobs.tasks.language_model.plan import LanguageModelPlan
from jobs.tasks.presets import classifiers
from jobs.tasks.presets import images as image_presets
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.storage import write_json
from pipelines.text.blocks import read_range
from pipelines.text.manifest import Manifest
from pipelines.text.tokenization import load_tokenizer
from tempnet import TempNet
from tempnet.base_model import BASE_FILE, BaseReference, base_digest, read_reference
from tempnet.contrastive.retrieval import cross_entropy, recall
from tempnet.loading import load_tempnet
from tempnet.models.dual_encoder import DualEncoder, load_pair_tempnets
from tempnet.models.packing import document_mask
from tempnet.models.sentence_encoder import SentenceEncoder
from tempnet.network import PAIRED_DIRECTORY
from tests.local_training import Asking, Call, history, train_plan

NUM_STEPS = 12
RUN = {"num_steps": NUM_STEPS, "checkpoint_every": 100, "log_every": 2, "num_checkpoints_kept": 3}
# Another number of processes adds up gradients in another order. High learning rates or low temperatures multiply such
# rounding errors, also between two runs with the same number; with these it does not.
GENTLE = {"learning_rate_base": 1e-4, "learning_rate_tempnet": 3e-4, "epsilon": 1e-4}
TAU_RANGE = {"tau_min": 0.1, "tau_max": 0.5}
SHARED: dict[str, dict[str, Any]] = {"run": RUN, "tracking": {"enabled": False}, "validation": {"every": 6}}


LABELS = {"neg": "bad", "pos": "good"}


def merged(*parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sections of several changes; later ones have precedence."""
    return {
        name: {key: value for part in parts for key, value in part.get(name, {}).items()}
        for part in parts
        for name in part
    }


def language_model(home: Path, name: str, sections: dict[str, dict[str, Any]]) -> Any:
    own: dict[str, dict[str, Any]] = {"validation": {"num_blocks": 16, "num_oracle_tokens": 256}}
    if name.startswith("distil"):
        own["distillation"] = {"teacher": str(home / "runs" / "lm-1" / "export")}
    if name.startswith("finetune"):
        own["model"] = {"path": str(home / "runs" / "lm-1" / "export"), "freeze": False}
    return make_plan(tiny_config(home / "corpus", home / "runs", name, **merged(SHARED, own, sections)))


def frozen(home: Path, name: str, sections: dict[str, dict[str, Any]]) -> Any:
    own = {
        "model": {"path": str(home / "runs" / "lm-1" / "export"), "freeze": True},
        "temperature": {"target_entropy": None, "calibrated_tau": 0.85, "num_calibration_tokens": 512},
    }
    return language_model(home, name, merged(own, sections))


def dual_encoder(home: Path, name: str, sections: dict[str, dict[str, Any]]) -> Any:
    own = {"model": {"image_path": str(home / "smooth")}, "optimizer": GENTLE}
    return make_plan(tiny_clip_config(home / "images", home / "runs", name, **merged(SHARED, own, sections)))


def image_encoder(home: Path, name: str, sections: dict[str, dict[str, Any]]) -> Any:
    own = {
        "run": {"name": name, "storage": str(home / "runs")},
        "data": {"train": str(home / "images" / "train"), "validation": str(home / "images" / "validation")},
        "model": {"path": str(home / "smooth"), "image_size": 32, "embedding_size": 16},
        "temperature": {"loss": "tempnet", "rho": 1.0, "hidden_size": 8, "num_prototypes": 8, **TAU_RANGE},
        "optimizer": {"batch_size": 16, **GENTLE},
        "workers": {"precision": "fp32", "num_threads": 1, "zero_stage": 1},
    }
    return make_plan(with_sections(image_presets.PRESETS["simclr-cifar10-small"](), merged(SHARED, own, sections)))


def sentences(home: Path, name: str, sections: dict[str, dict[str, Any]]) -> Any:
    own = {"optimizer": GENTLE, "temperature": TAU_RANGE}
    words = home / "wordpiece"
    return make_plan(tiny_sentences(home / "corpus", words, home / "runs", name, **merged(SHARED, own, sections)))


def classifier(home: Path, name: str, sections: dict[str, dict[str, Any]]) -> Any:
    file, tokenizer = str(home / "labelled.tsv"), str(home / "wordpiece")
    own = {
        "data": {"directory": "", "num_examples": 0, "file": file, "tokenizer": tokenizer},
        "model": {"path": "", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.0},
        "grid": {"seeds": (0,), "num_folds": 2, "with_baseline": False, "keep_models": True, "num_centers": (3,)},
        "optimizer": {"batch_size": 8, "epsilon": 1e-4},
        "workers": {"precision": "fp32", "num_threads": 1, "zero_stage": 2, "cpus_per_worker": 1.0},
    }
    (cell, *_) = with_sections(classifiers.PRESETS["triple-entropy-small"](), own).cells()
    run = {"run": {"name": name, "storage": str(home / "runs")}}
    return make_plan(with_sections(cell, merged(SHARED, run, sections)))


class Site:
    """A directory with small data of every task, in which one or two processes train."""

    def __init__(self, home: Path, calls: dict[int, Call]) -> None:
        self.home, self.calls = home, calls
        self.outcomes: dict[str, Any] = {}

    def train(
        self, make: Callable[..., Any], name: str, num_processes: int = 1, *, stop: bool = False, **sections: Any
    ) -> Any:
        settings = {"mailbox": Asking(after_step=6, must_stop=True)} if stop else {}
        sections = merged(sections, {"workers": {"num_workers": num_processes}})
        plan = partial(make, self.home, name, sections)
        return self.calls[num_processes](train_plan, plan, f"{self.home}/{name}", settings)[0]

    def alone(self, case: str) -> Any:
        """Return the outcome of a case that one process has trained, which is done once."""
        if case in ("frozen", "distil", "finetune"):
            self.alone("lm")  # the base, or the teacher
        if case not in self.outcomes:
            make, sections = CASES[case]
            self.outcomes[case] = self.train(make, f"{case}-1", **sections)
        return self.outcomes[case]

    def assert_same(self, name: str, other: str, *, tolerance: float) -> None:
        """Assert that two runs have had the same batches, and nearly the same losses and state of every sample."""
        steps, expected = history(self.home / name), history(self.home / other)
        assert sorted(steps) == sorted(expected) == list(range(1, NUM_STEPS + 1))
        assert {step: digest for step, (_, digest) in steps.items()} == {
            step: digest for step, (_, digest) in expected.items()
        }
        for step, (loss, _) in expected.items():
            assert steps[step][0] == pytest.approx(loss, abs=tolerance), step
        states, wanted = (sample_states({"directory": self.home / "runs" / run}, NUM_STEPS) for run in (name, other))
        assert states.keys() == wanted.keys()
        for key, values in wanted.items():
            torch.testing.assert_close(states[key], values, rtol=0, atol=tolerance / TAU_RANGE["tau_min"], msg=key)


@pytest.fixture(scope="module")
def site(
    corpus: Path, wordpiece: Path, images: Path, alone: Call, together: Call, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    home = tmp_path_factory.mktemp("tasks")
    for name, directory in {"corpus": corpus, "wordpiece": wordpiece, "images": images}.items():
        (home / name).symlink_to(directory)
    write_smooth_tower(home / "smooth")
    rows = [
        (label, f"{word} abc {'def ' * (number % 4)}{number}") for number in range(20) for label, word in LABELS.items()
    ]
    (home / "labelled.tsv").write_text("\n".join(map("\t".join, rows)))
    return Site(home, {1: alone, 2: together})


CASES: dict[str, tuple[Callable[..., Any], dict[str, dict[str, Any]]]] = {
    "lm": (language_model, {"optimizer": {"micro_batch_size": 2}}),  # one process accumulates 4, two accumulate 2
    "distil": (
        language_model,
        {"temperature": {"loss": "distil"}, "model": {"hidden_size": 32}, "optimizer": {"epsilon": 1e-4},
         "workers": {"micro_batch": "auto"}},
    ),
    "finetune": (
        language_model,
        {"temperature": {"loss": "ce"}, "workers": {"activation_checkpointing": True}, "optimizer": {"epsilon": 1e-4}},
    ),
    "frozen": (frozen, {"workers": {"zero_stage": 3}}),
    "clip-tempnet": (dual_encoder, {"temperature": {"loss": "tempnet", "target_tau": 0.2, "rho": 1.0, **TAU_RANGE}}),
    "clip-isogclr": (
        dual_encoder,
        {"temperature": {"loss": "isogclr", "target_tau": None, "tau": 0.2, "tau_step": 1e-3, **TAU_RANGE}},
    ),
    "images": (image_encoder, {}),
    "sentences": (sentences, {}),
    "classifier": (classifier, {"workers": {"zero_stage": 1}}),
    "supcon": (classifier, {"setting": {"contrastive_weight": 0.9}}),
}  # fmt: skip


# "finetune" is the loop of "lm" from other weights; what its checkpointing computes is tested in test_causal_lm.py.
@pytest.mark.parametrize("case", [case for case in CASES if case != "finetune"])
def test_two_processes_train_what_one_does_and_an_interrupted_run_goes_on(site: Site, case: str) -> None:
    make, sections = CASES[case]
    alone = site.alone(case)
    together = site.train(make, f"{case}-2", 2, **sections)
    site.assert_same(f"{case}-2", f"{case}-1", tolerance=1e-5)
    for part in {"validation", "rivals"} & alone.keys():
        assert together[part].keys() == alone[part].keys()
        for key, value in alone[part].items():
            assert together[part][key] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), key
    stopped = site.train(make, f"{case}-3", 2, stop=True, **sections)
    assert 6 < stopped["interrupted"] < NUM_STEPS
    again = site.train(make, f"{case}-3", 1, **sections)
    assert again["resumed_from_step"] == stopped["interrupted"]
    site.assert_same(f"{case}-3", f"{case}-1", tolerance=1e-5)


def test_dropout_after_an_interruption_is_what_it_would_have_been(site: Site) -> None:
    dropout = {"model": {"dropout": 0.3}}
    site.train(classifier, "dropout", **dropout)
    assert "interrupted" in site.train(classifier, "dropped", stop=True, **dropout)
    site.train(classifier, "dropped", **dropout)
    site.assert_same("dropped", "dropout", tolerance=1e-6)
    site.alone("classifier")
    assert history(site.home / "dropped")[1] != history(site.home / "classifier-1")[1]


@pytest.mark.long  # inductor compiles for minutes; tests/tempnet/models/test_compiled.py shows the graphs without it
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_compiled_blocks_train_what_eager_ones_do(site: Site, zero_stage: int) -> None:
    alone = site.alone("lm")
    sections = {**CASES["lm"][1], "workers": {"compile": "on", "zero_stage": zero_stage}}
    compiled = site.train(language_model, f"lm-compiled-{zero_stage}", 2, **sections)
    site.assert_same(f"lm-compiled-{zero_stage}", "lm-1", tolerance=1e-4)
    assert compiled["validation"]["cross_entropy_tau"] == pytest.approx(
        alone["validation"]["cross_entropy_tau"], rel=1e-4
    )


@pytest.mark.parametrize("compile", ["on", "off"])
def test_the_environment_of_a_worker_lets_blocks_be_compiled(tmp_path: Path, compile: str) -> None:
    config = tiny_config(tmp_path, tmp_path, "a", workers={"compile": compile})
    code = "import torch; from torch._dynamo.utils import counters; torch.compile(torch.sin, backend='eager')(torch.ones(1))"
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"} | worker_environment(config)
    words = [sys.executable, "-c", f"{code}; print(counters['frames']['ok'])"]
    found = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    assert int(found.stdout) == (compile == "on")


@pytest.mark.long
def test_a_command_without_ray_compiles_blocks_and_keeps_them(corpus: Path, tmp_path: Path) -> None:
    words = [
        sys.executable, "-m", "jobs.train_lm", *tiny_options(corpus, tmp_path, "compiled"),
        f"--run.prepared={tmp_path}/prepared", "--run.num-steps=1", "--tracking.no-enabled", "--workers.local",
        "--workers.num-workers=1", "--workers.compile=on",
    ]  # fmt: skip
    said = subprocess.run(words, check=True, capture_output=True, text=True)
    assert "most of it to compile the base's blocks" in said.stdout + said.stderr
    assert list((tmp_path / "prepared" / "compiled").rglob("*.so"))


@pytest.mark.parametrize("case", [case for case in CASES if case != "distil"])
def test_between_reports_a_step_reads_no_value_that_it_would_wait_for_on_a_gpu(site: Site, case: str) -> None:
    """DeepSpeed itself reads the norm of the gradients. How many pairs are no negatives decides about shapes, and is read
    from the ids. With a teacher the oracle of its temperatures stops when all have converged, and reads that."""
    site.alone(case)
    reads = (site.home / f"{case}-1.reads").read_text().splitlines()
    assert [line for line in reads if not line.startswith("tempnet/contrastive/tiles.py")] == []


@pytest.mark.parametrize("case", CASES)
def test_a_run_leaves_its_report_and_its_figures(site: Site, case: str) -> None:
    outcome = site.alone(case)
    report = Path(outcome["directory"]) / "report"
    tokens = {"tokens.html", "histogram.png"}
    pages = {"classifier": set(), "supcon": set()} | dict.fromkeys(("lm", "frozen", "distil", "finetune"), tokens)
    files = {"summary.txt", "outcome.json", "configuration.json"} | pages.get(case, {"histogram.png"})
    assert {path.name for path in report.iterdir()} == files
    assert json.loads((report / "outcome.json").read_text())["validation"].keys() == outcome["validation"].keys()
    summary = (report / "summary.txt").read_text()
    if pages.get(case):
        assert ("regret" in summary) == ("ρ" in summary) == (case in ("lm", "frozen"))
        page = (report / "tokens.html").read_text()
        assert 0 < page.count('title="τ ') <= len(outcome["passage"]["tau"])
        assert "http" not in page  # The page is self-contained.
    if case in ("classifier", "supcon", "distil", "finetune", "images"):  # no temperatures of theirs are judged
        return
    figures = outcome["rivals"]
    for prefix in ("image/", "text/") if case.startswith("clip") else ("",):
        assert figures[f"{prefix}robust/best_constant_loss"] <= figures[f"{prefix}robust/mean_shift_loss"] + 1e-4
    assert (outcome.get("judged_on") == "training") == (case == "clip-isogclr")  # where its temperatures are
    assert outcome["temperature_verdict"] in summary
    if case != "clip-isogclr":  # it learns τ of the samples, without a network
        card = ModelCard.load(Path(outcome["export"]) / "README.md")
        assert card.data.library_name == "tempnet"
        rows = dict(re.findall(r"^\| (\S.*) \| (.*) \|$", card.text, re.MULTILINE))
        shown = figures["text/robust/loss" if case.startswith("clip") else "robust/loss"]
        assert rows["robust loss at the learned τ"] == f"{shown:.4f}"


def test_a_language_model_is_exported_for_transformers_and_scores_what_was_validated(site: Site) -> None:
    outcome = site.alone("lm")
    model = AutoModelForCausalLM.from_pretrained(outcome["export"]).eval()
    network = TempNet.from_pretrained(Path(outcome["export"]) / "tempnet")
    assert len(AutoTokenizer.from_pretrained(outcome["export"])) == network.config.input_size == 512
    (prepared,) = (site.home / "corpus" / "prepared").glob("validation-64-*")
    blocks = {name: torch.from_numpy(value) for name, value in read_range(Manifest.load(str(prepared)), 0, 16).items()}
    with torch.no_grad():
        mask = document_mask(blocks["position_ids"])
        logits = model(blocks["input_ids"], position_ids=blocks["position_ids"], attention_mask=mask).logits[..., :512]
        tau = network(logits)
    valid = blocks["targets"] != -100
    logits, tau, targets = logits[valid], tau[valid], blocks["targets"][valid]
    scores = outcome["validation"]
    assert torch.nn.functional.cross_entropy(logits, targets).item() == pytest.approx(scores["cross_entropy"], abs=1e-5)
    at_tau = torch.nn.functional.cross_entropy(logits / tau[:, None], targets).item()
    assert at_tau == pytest.approx(scores["cross_entropy_tau"], abs=1e-5)
    assert tau.mean().item() == pytest.approx(scores["tau_mean"], abs=1e-5)
    passage, page = outcome["passage"], (Path(outcome["directory"]) / "report" / "tokens.html").read_text()
    likeliest = (logits / tau[:, None]).softmax(-1).topk(3)
    assert passage["likeliest"][:20] == likeliest.indices[:20].tolist()
    np.testing.assert_allclose(passage["probability"][:20], likeliest.values[:20], rtol=1e-3)
    assert " · likeliest at τ: &quot;" in page


def test_a_frozen_base_is_named_and_not_copied(site: Site) -> None:
    outcome, base = site.alone("frozen"), site.alone("lm")["export"]
    run = Path(outcome["directory"])
    # Under ZeRO 3 no process loads the base whole, and it predicts what its own run has validated.
    plan: LanguageModelPlan = CASES["frozen"][0](site.home, "frozen-1", CASES["frozen"][1])
    assert find_divisible_base(plan.config) is not None
    passages = [found["passage"] for found in (outcome, site.alone("lm"))]  # the first has no ends of documents
    ours, theirs = ([h for h, token in zip(p["entropy"], p["token"], strict=True) if token][:40] for p in passages)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    calibration = json.loads((run / "calibration.json").read_text())
    assert calibration["tau_mean"] == pytest.approx(0.85, abs=1e-3)
    assert outcome["rho"] == calibration["rho"] == load_tempnet(outcome["export"]).config.rho
    (checkpoint,) = run.glob("checkpoint-*[0-9]")
    named = BaseReference(path=base, digest=base_digest(base))
    assert read_reference(checkpoint) == read_reference(outcome["export"]) == named
    num_trained = sum(value.numel() for value in load_tempnet(outcome["export"]).parameters())
    assert sum(file.stat().st_size for file in checkpoint.rglob("*")) < 24 * num_trained + 100_000
    # A run that is continued keeps the ρ that it began with, and refuses another base.
    write_json(f"{run}/calibration.json", calibration | {"rho": 1.25})
    assert plan.prepare().outcome["rho"] == 1.25
    write_json(f"{run}/{BASE_FILE}", {"path": base, "digest": "another"})
    with pytest.raises(ValueError, match=r"run\.name = 'frozen-1' cannot continue: the base model"):
        plan.prepare()


def test_the_range_of_tau_and_the_end_of_a_document_are_measured_on_a_frozen_base(site: Site) -> None:
    site.alone("lm")
    proper = {"temperature": {"loss": "proper", "calibrated_tau": 0.85}, "data": {"validation": ""}}
    plan = frozen(site.home, "proper", proper)
    assert "τ_max to be chosen by the headroom test" in plan.describe()
    assert "is a target if the base knows it, which is measured" in plan.describe()
    prepared = plan.prepare()
    record: Any = prepared.records["calibration.json"]
    end, found = record["end_of_document"], record["tau_range"]
    assert 0 < end["probability"] < 0.01  # a model of 12 steps, of 512 tokens
    assert end["num_documents"] > 10
    assert found["low"] <= found["best_constant"] <= found["high"] < found["tau_max"]
    assert found["tau_max"] >= 2 * found["best_constant"] - 1e-6
    assert prepared.outcome["tau_max"] == found["tau_max"]
    assert prepared.parameters["resolved.end_of_document"] == "ignored"
    # What was measured stands beside the prepared text, of which a fifth is held out, and is read by the next run.
    (file,) = (site.home / "corpus" / "prepared").glob("train-64-others-*/measured-*.json")
    file.write_text(json.dumps(record | {"tau_range": found | {"tau_max": 7.0}}))
    assert plan.prepare().outcome["tau_max"] == 7.0
    texts = {name: data[0] for name, data in prepared.data_sets.items()}
    assert texts["training"] == texts["validation"]
    given = frozen(site.home, "given", merged(proper, {"temperature": {"tau_max": 3.0}})).prepare()
    assert given.outcome["tau_max"] == 3.0
    assert "tau_range" not in given.records["calibration.json"]


def test_of_dual_encoders_the_best_model_is_exported(site: Site) -> None:
    outcome = site.alone("clip-tempnet")
    export = Path(outcome["export"])
    encoder, networks = DualEncoder.from_pretrained(export), load_pair_tempnets(export)
    AutoModel.from_pretrained(export / "image_encoder")  # Transformers loads it without this project.
    (directory,) = (site.home / "images" / "prepared").glob("validation-*")
    tokenizer = load_tokenizer(str(export / "text_encoder"), needs_eos=False)
    source = PairSource(manifest=ImageManifest.load(str(directory)), tokenizer=tokenizer, image_size=32)
    captions, image_of_text = source.captions()
    tokens = source.encoder.encode(captions)
    with torch.no_grad():
        image = encoder.encode_images(torch.from_numpy(source.read_images(range(20))))
        text = encoder.encode_texts(*(torch.from_numpy(tokens[name]) for name in ("input_ids", "attention_mask")))
        tau = networks[0](image), networks[1](text)
    owners = torch.from_numpy(image_of_text)
    scores = [found["scores"] for found in outcome["validations"]]
    best = max(scores, key=lambda found: found["mean_recall"])
    assert recall(image, text, owners)["mean_recall"] == pytest.approx(best["mean_recall"], abs=1e-6)
    assert cross_entropy(image, text, owners, tau) == pytest.approx(best["cross_entropy_tau"], rel=1e-4)


def test_image_encoders_are_exported_for_transformers_and_a_linear_probe_scores_them(site: Site) -> None:
    outcome = site.alone("images")
    export = Path(outcome["export"])
    assert TempNet.from_pretrained(export / PAIRED_DIRECTORY).config.input_size == 16
    model, read = AutoModel.from_pretrained(export), json.loads((export / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(read[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    features, concepts = [], []
    for split in ("train", "validation"):
        manifest = prepare_split(image_encoder(site.home, "images-1", {}).config, split)
        source = PairSource(manifest=manifest, image_size=32)
        concepts.append(source.captions()[0])
        pixels = torch.from_numpy(source.read_images(range(manifest.num_images))).permute(0, 3, 1, 2) / 255
        with torch.no_grad():
            features.append(model((pixels - mean) / std)["pooler_output"].flatten(1).numpy())
    (train, held_out), (labels, expected) = features, map(np.array, concepts)
    assert outcome["num_images_of_unknown_class"] == sum(concept not in labels for concept in expected)
    scored = probe_accuracy(train, labels, held_out, expected, regularisation=1.0)
    assert outcome["validation"]["probe_accuracy"] == pytest.approx(scored, abs=0.051)  # an image may lie at a border


def test_sentence_encoders_and_classifiers_are_exported_for_transformers(site: Site) -> None:
    export = Path(site.alone("sentences")["export"])
    tokenizer, plain = AutoTokenizer.from_pretrained(export), AutoModel.from_pretrained(export)
    tokens = tokenizer(["a short text", "one more"], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = plain(tokens["input_ids"], attention_mask=tokens["attention_mask"])["last_hidden_state"]
        mask = tokens["attention_mask"][..., None]
        found = SentenceEncoder.from_pretrained(export)(tokens["input_ids"], tokens["attention_mask"])
        torch.testing.assert_close(found, (hidden * mask).sum(1) / mask.sum(1))
    assert TempNet.from_pretrained(export / PAIRED_DIRECTORY).config.input_size == 16
    export = Path(site.alone("classifier")["export"])
    model = AutoModelForSequenceClassification.from_pretrained(export)
    assert model.config.id2label == {0: "neg", 1: "pos"}
    assert AutoTokenizer.from_pretrained(export).encode("good film")


def test_what_the_data_are_too_few_for_is_refused(site: Site) -> None:
    with pytest.raises(ValueError, match=r"temperature\.rho = 4\.6 is not below log\(N − 1\) = 4\.5951"):
        dual_encoder(site.home, "large", {"temperature": {"rho": 4.6}}).prepare()
    with pytest.raises(ValueError, match=r"data\.train = .*' holds no document of 800 tokens.*data\.max_length = 200 "):
        sentences(site.home, "long", {"data": {"max_length": 200, "min_num_tokens": 0}}).prepare()


def test_a_student_learns_from_its_teacher_and_a_finetuned_model_from_where_it_began(site: Site) -> None:
    scores = [found["scores"]["cross_entropy"] for found in site.alone("distil")["validations"]]
    assert scores[-1] < scores[0]
    assert not any("teacher" in file.name for file in Path(site.alone("distil")["export"]).rglob("*"))
    losses = history(site.home / "finetune-1")
    assert losses[1][0] == pytest.approx(site.alone("lm")["validation"]["cross_entropy"], abs=0.5)
    assert not (Path(site.alone("finetune")["export"]) / "tempnet").exists()


def test_a_teacher_with_another_tokenizer_or_none_is_refused(site: Site, tmp_path: Path) -> None:
    site.alone("lm")
    distil = {"temperature": {"loss": "distil"}}
    with pytest.raises(ValueError, match=r"distillation\.teacher = '.*nowhere' is missing: there is no such file"):
        language_model(site.home, "nobody", merged(distil, {"distillation": {"teacher": str(tmp_path / "nowhere")}}))
    (tmp_path / "other").mkdir()
    tokenizer = Tokenizer.from_file(str(site.home / "corpus" / "tokenizer" / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(tmp_path / "other" / "tokenizer.json"))
    other = {"data": {"tokenizer": str(tmp_path / "other" / "tokenizer.json")}}
    with pytest.raises(ValueError, match=r"is not the tokenizer of distillation\.teacher = "):
        language_model(site.home, "distil-other", merged(distil, other))
