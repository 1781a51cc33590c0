"""Every job of scoring refuses bad input before it loads a model or starts Ray: in one line with status 2.

That a model or a file is missing is tried of all jobs in `tests/jobs/test_exit_status.py`.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clip_support import make_classes, make_clip, make_dual_encoder_with_tempnets, make_pairs
from evaluation_support import MAX_LENGTH, QUESTIONS, TEXT, make_export, write_lines
from prediction_support import VOCAB_SIZE, save_tiny_model, some_texts
from transformers import DistilBertConfig, DistilBertModel, GPT2Config, T5Config

from jobs.scoring.calibration.config import Rho
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.generation.config import GenerateConfig, PlaygroundConfig
from jobs.scoring.language_models.harness import Tasks
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from pipelines.text.tokenization import train_bpe
from tempnet import TempNet, TempNetConfig
from tests.jobs.scoring.evaluation_cases import EXAMPLES
from tests.jobs.scoring.generation_support import VOCABULARY, make_model

PROMPT = {"prompt": "a", "answer": "y"}
FILES: dict[str, list[Any]] = {
    "p.jsonl": [PROMPT, {"prompt": "xxxxx", "answer": "y"}],
    "one.jsonl": [PROMPT],
    "number.jsonl": [PROMPT, {"prompt": 3}],
    "twice.jsonl": [PROMPT | {"id": 1}, {"prompt": "b", "id": 1}],
    "empty.jsonl": [],
    "long.jsonl": [{"prompt": "a b c d e f g " * 20, "answer": "y"}],
    "new.jsonl": [{"id": "h1", "prompt": "new"}],
    "alpaca.json": [[{"instruction": "a", "dataset": "b"}, {}]],
    "turns.jsonl": [{"question_id": 1, "turns": []}],
    "gsm8k.jsonl": [{"question": "a", "answer": "b"}],
    "texts.jsonl": [{"text": text} for text in some_texts(12)],
    "bad.jsonl": [{"text": "a b"}, {"txt": "c"}],
    "arc_easy_test.jsonl": QUESTIONS,
}
DEFAULTS = {
    "generate": "--model unread --prompts p.jsonl --output out --max-new-tokens 12",
    "train_reward": "--model gpt2 --prompts p.jsonl --verifier.name exact --max-new-tokens 8",
    "predict_temperatures": "--model tiny --text a.txt",
    "predict_temperatures --images": "--images pairs --model dual --output out",
    "calibrate headroom": "--model tiny --text texts.jsonl --output out",
    "calibrate tau-max": "--model gpt2 --prompts p.jsonl",
    "calibrate headroom --images": "--images pairs --model dual --output out",
    "analyse decoders": "--model gpt2 --text texts.jsonl --output out --prompt-tokens 5",
    "analyse tau-max": "--models m --wikitext a.txt --output out",
    "analyse noise": "--model m --images i --label l --output out",
    "evaluate_lm": "--models export --wikitext a.txt",
    "evaluate_clip": "--models dual --zero-shot c=classes.tar",
    "evaluate_sentences": "--models a --data x",
}
REFUSED = {
    "generate": {
        "--prompts number.jsonl": "number.jsonl line 2: `prompt` is missing or no string",
        "--prompts cut.jsonl": "cut.jsonl line 2: no JSON",
        "--prompts twice.jsonl": "the id 1 comes twice",
        "--prompts empty.jsonl": "holds no prompts",
        "--prompts long.jsonl": "the shortest prompt has",
        "--format alpaca-eval --prompts one.jsonl": "JSON list",
        "--format alpaca-eval --prompts alpaca.json": "record 1: `instruction`",
        "--format mt-bench --prompts turns.jsonl": "line 1: `turns`",
        "--format gsm8k --prompts gsm8k.jsonl": "line 1: `answer` does not end in ####",
        "--max-new-tokens 64": "max_new_tokens = 64 leaves no room",
        "--temperature 0": "temperature = 0 must be positive",
        "--temperature warm": "neither a number nor one of auto, tempnet, greedy",
        "--temperature greedy --top-k 3": "greedy draws nothing",
        "--temperature 0.7 --tau-max-eval 1": "uses no TempNet",
        "--tau-max-eval 0.001": "not above tau_min",
        "--top-p 0": "top_p = 0",
        "--chat on": "has no chat template",
        "--tempnet big": f"was built for {VOCABULARY + 1} logits",
        "--tempnet /nowhere": "/nowhere is missing: it is neither a directory, nor a file",
        "--model chat --temperature tempnet": "holds no TempNet",
        "--output a.txt": "line 1 is no record of this job",
        "--output instructions.json": "instructions.json holds something else than records of this job",
        "--output a.txt --format alpaca-eval --prompts instructions.json": "this job did not write it",
        "--model adapter": "adapter holds an adapter and no model: merge it",
        "--model awq": "awq holds weights quantised by awq: install what it needs, or",
    },
    "train_reward": {
        "--group-size 1": "group_size = 1 must be at least 2",
        "--learning-rate 0": "learning_rate = 0 must be positive",
        "--leash.target-kl -1": "leash.target_kl = -1.0 must be positive",
        "--leash.allowance 0": "leash.allowance = 0.0 must be positive",
        "--leash.weight 1e-5": "leash.weight = 1e-05 must lie in [0.0001, 10000]",
        "--verifier.name no_such_module:check": "verifier.name = no_such_module:check: ModuleNotFoundError",
        "--temperature.tau-min 3": "0 < tau_min < tau_max does not hold",
        "--temperature.path gpt2": "holds a TempNet with",
        "--temperature.path missing": "temperature.path = missing is missing",
        "--format gsm8k": "verifier.name = exact needs other fields than format = gsm8k has",
        "--name a/b": "must be a plain file name",
        "--workers.num-workers 0": "workers.num_workers = 0 must be positive",
        "--max-new-tokens 64": "max_new_tokens = 64 leaves no room for a prompt",
        "--max-new-tokens 60 --prompts long.jsonl": "leaves room for 4 beside max_new_tokens = 60",
        "--max-new-tokens 63 --chat on": "chat = on: the tokenizer of",
        "--held-out-prompts missing.jsonl": "held_out_prompts = ",
        "--held-out-prompts p.jsonl": "2 of its prompts are in prompts = ",
        "--held-out-prompts new.jsonl": "prompt 'h1': verifier.name = exact",
        "--held-out-prompts long.jsonl": "long.jsonl': the shortest has",
        "--tracking.uri nowhere": "tracking.uri = 'nowhere' is no address of MLflow",
    },
    "predict_temperatures": {
        "--text a.zip": "unknown suffix",
        "--text latin.txt": "invalid_utf8",
        "--tempnet .": "holds no TempNet",
        "--tempnet big": f"was built for a vocabulary of {VOCABULARY + 1}, the tokenizer of tiny has {VOCAB_SIZE} tokens",
        "--stride 17": "stride = 17 must lie in 1 … 16",
        "--context-length 17": "context_length = 17 must lie in 1 … 16",
        "--output a.txt/output": "a.txt",
        "--html nowhere/page.html": "nowhere/page.html",
    },
    "predict_temperatures --images": {
        "--model .": "holds no TempNet",
        "--model empty --tempnet dual": "empty holds no Transformers model",
        "--tempnet wide": "tempnet_text reads 7 embeddings, the embeddings of",
        "--tempnet half": "tempnet_image holds no TempNet",
        "--part-pairs 0": "part_pairs = 0",
        '--output ""': "output is empty",
        "--label n": "label = n is shown on the page only: html must name a file",
    },
    "calibrate headroom": {
        "--images pairs": "give one of them, text for a language model, or images for an image–text model",
        "--gallery-images 500": "gallery_images = 500 has no meaning with text: leave it out",
        "--folds 2": "folds = 2 must be at least 3",
        "--folds 13": "has 12 readable documents, fewer than folds = 13",
        "--model dual": "model = 'dual' is an image–text model, and text is for causal language models: give images in its",
        "--model clip": "clip is no causal language model (clip): a model that predicts the next token",
        "--model encoder": "encoder is no causal language model (distilbert)",
    },
    "calibrate headroom --images": {
        '--images ""': "text = '' and images = '': give one of them",
        "--model tiny": "neither image_encoder/, nor a Transformers CLIPModel (its model_type is 'gpt2')",
        "--captions nowhere.json": "nowhere.json",
        "--splits test": "splits = test selects from captions, which is empty",
        "--gallery-images 2": "gallery_images = 2 must be at least 3",
        "--context-length 64": "context_length = 64 has no meaning with images: leave it out",
        "--precision int8": "precision = int8 is for language models: choose fp32 or bf16 with images",
        "--workers.device-map auto": "workers.device_map = auto spreads language models only",
    },
    "analyse decoders": {
        "--num-samples 1": "num_samples = 1 must be at least 2",
        "--k 9": "k = 9 must be at most num_samples = 8",
        "--format gsm8k": "format = gsm8k needs prompts",
        "--max-documents 3": "has 3 documents of 2 tokens and more, and two halves need 4",
        "--max-new-tokens 8 --tempnets missing": "missing",
        "--max-new-tokens 8 --tempnets states": "states: the TempNet reads hidden states of 33 numbers, those of",
        "--max-new-tokens 60": "prompts fit into the context",
    },
    "calibrate tau-max": {
        "--max-rounds 1": "max_rounds = 1 must be at least 2",
        "--tolerance 0": "tolerance = 0.0 must be positive",
    },
    "analyse tau-max": {
        "--tau-max 1": "tau_max = 1 must be at least two rising positive numbers",
        "--tau-max 1 1": "tau_max = 1 1 must be",
        "--models m m/": "models names 'm' twice",
    },
    "analyse noise": {
        "--share -0.1": "share = -0.1 must lie in (0, 1)",
    },
    "evaluate_lm": {
        "--models t5": "t5 is an encoder with a decoder (t5)",
        "--lambada bad.jsonl": "bad.jsonl, line 2: no JSON object with a string `text`",
        '--wikitext ""': "nothing to evaluate on",
        "--models gpt2-alone --temperatures tempnet": "temperature 'tempnet' needs a TempNet, and",
        "--models export-with-gpt2": f"built for a vocabulary of {VOCABULARY}, the tokenizer of",
        "--tempnets none none": "tempnets names 2 networks for 1 models",
        "--temperatures": "temperatures is empty: name one",
        "--temperatures tempnet:0.0001": "tau_max_eval = 0.0001 is not above tau_min",
        "--temperatures fixed:0.5 fixed:0.50": "names something twice",
        f"--max-length {MAX_LENGTH + 1}": "more than the 24 positions",
        "--tasks wikitext": "use --wikitext FILE",
        f"--tasks local_arc_easy --include-path {EXAMPLES} --data-dir empty": "arc_easy_test.jsonl, which is no file",
        f"--tasks local_arc_eazy --include-path {EXAMPLES} --data-dir .": "'local_arc_eazy' is unknown: did you mean local",
        "--num-fewshot -2": "num_fewshot = -2 must be at least -1",
    },
    "evaluate_clip": {
        "--models": "models is empty",
        "--models runs/a runs/a/": "models names 'runs/a' twice",
        "--models empty": "empty holds no Transformers model",
        "--models bare": "has no tokenizer",
        "--models foreign": "has 305 tokens, the model 300",
        "--zero-shot": "nothing to evaluate on",
        "--zero-shot cifar.tar": "'cifar.tar' is not NAME=VALUE",
        "--zero-shot c=x c=y": "zero_shot names 'c' twice",
        "--retrieval c=y": "retrieval and zero_shot both name a set 'c'",
        "--retrieval r=classes.tar --captions r=no.json": "no.json",
        "--captions d=x.json": "captions names the set 'd', which is not among those to evaluate on: none",
        "--templates d=cifar": "templates names the set 'd', which is not among those to evaluate on: c",
        "--templates cifar imagenet": "only one is for all sets",
        "--templates imagnet": "neither imagenet nor cifar, nor a file",
        "--class-names c=cifar": "neither cifar10 nor cifar100, nor a file",
        "--max-bad-share 1.5": "max_bad_share = 1.5 must lie in",
    },
    "evaluate_sentences": {
        "--models a a/": "models names 'a' twice",
        '--data ""': "nothing to evaluate on",
        "--num-folds 1": "num_folds = 1 must be at least 2",
        "--max-bad-share 2": "max_bad_share = 2 must lie in [0, 1]",
        "--tasks STS": "tasks: 'STS' is unknown: choose one of MR",
        "--tasks MR --similarity MR=f": "tasks and similarity name 'MR' twice",
    },
}
# Every language-model job looks at the configuration of its model first.
for job in ("train_reward", "predict_temperatures", "calibrate headroom", "analyse decoders"):
    REFUSED[job]["--model t5"] = "t5 is an encoder with a decoder (t5)"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of models, texts, prompts and images; the weights of `unread` cannot be read."""
    place = tmp_path_factory.mktemp("place")
    for name, lines in FILES.items():
        write_lines(place / name, lines)
    (place / "cut.jsonl").write_text('{"prompt": "a"}\n{"pro')
    (place / "instructions.json").write_text(json.dumps([{"instruction": "a", "dataset": "b"}]))
    (place / "a.txt").write_text(TEXT)
    (place / "a.zip").write_bytes(b"")
    (place / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (place / "empty").mkdir()
    (place / "temperatures.html").touch()  # predict_temperatures leaves an empty page behind
    make_model(place / "gpt2", "gpt2", 64)
    shutil.copytree(place / "gpt2", place / "unread")
    (place / "unread" / "model.safetensors").write_bytes(b"not to be read")
    make_model(place / "chat", "llama", 400, tempnet=False, chat=True)
    save_tiny_model(place / "tiny")
    save_tiny_model(place / "encoder")
    config = DistilBertConfig(vocab_size=VOCAB_SIZE, dim=8, n_heads=2, n_layers=1, hidden_dim=8)
    DistilBertModel(config).save_pretrained(place / "encoder")
    make_export(place / "export")
    make_export(place / "gpt2-alone", with_tempnet=False)
    shutil.copytree(place / "export", place / "export-with-gpt2")
    shutil.copytree(place / "gpt2" / "tempnet", place / "export-with-gpt2" / "tempnet", dirs_exist_ok=True)
    TempNet(TempNetConfig.for_logits(VOCABULARY + 1, rho=2.0, hidden_size=4, num_prototypes=4)).save_pretrained(
        place / "big"
    )
    states = TempNetConfig.for_hidden(VOCABULARY, 33, with_logits=False, rho=2.0, hidden_size=4, num_prototypes=4)
    TempNet(states).save_pretrained(place / "states")
    for name in ("t5", "adapter", "awq"):
        shutil.copytree(place / "gpt2", place / name)
    T5Config().save_pretrained(place / "t5")
    (place / "adapter" / "config.json").rename(place / "adapter" / "adapter_config.json")
    GPT2Config(quantization_config={"quant_method": "awq", "bits": 4}).save_pretrained(place / "awq")
    make_clip(place / "clip")
    make_dual_encoder_with_tempnets(place / "dual")
    for name in ("bare", "foreign", "wide"):
        shutil.copytree(place / "dual", place / name)
    for file in (place / "bare" / "text_encoder").glob("tokenizer*"):
        file.unlink()
    sentence = "several other words that nobody would look for in any of these sentences"
    train_bpe([sentence] * 3, 305).save_pretrained(place / "foreign" / "text_encoder")
    wide = TempNet(TempNetConfig.for_embeddings(7, hidden_size=4, num_prototypes=4))
    wide.save_pretrained(place / "wide" / "tempnet_text")
    shutil.copytree(place / "dual" / "tempnet_text", place / "half" / "tempnet_text")
    make_classes(place / "classes.tar")
    (place / "pairs").mkdir()
    make_pairs(place / "pairs")
    return place


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [(job, options, message) for job, cases in REFUSED.items() for options, message in cases.items()],
    ids=lambda value: value if value in REFUSED or value.startswith("-") else "",
)
def test_bad_input_is_refused_in_one_line_before_anything_starts(
    job: str, options: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # The harness's own tasks are in 14 000 files.
    monkeypatch.setattr(Tasks, "_all", property(lambda tasks: tasks._own))
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    assert message in refusal(*job.removesuffix(" --images").split(), *shlex.split(f"{DEFAULTS[job]} {options}"))
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_devices_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="gpus_per_worker = 2 must be 1, or more with"):
        LanguageModelPool(gpus_per_worker=2, use_gpu=True)
    assert LanguageModelPool(gpus_per_worker=2, use_gpu=True, device_map="auto").num_gpus == 2
    assert LanguageModelPool(device_map="auto").num_gpus == 0
    with pytest.raises(ValueError, match="num_gpus = 2 must be 1, or more with use_gpu and device_map = auto"):
        Rho(model="m", text="t", num_gpus=2, use_gpu=True)
    with pytest.raises(ValueError, match="device_map = auto chooses the devices: leave out device = cuda:1"):
        PlaygroundConfig(model="m", device="cuda:1", device_map="auto")


def test_eight_bits_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match="dtype = fp8 needs torchao, which is not installed: pip install"):
        GenerateConfig(model="m", prompts="p", output="o", dtype="fp8")
    with pytest.raises(ValueError, match="precision = int8 needs torchao, which is not installed: pip install"):
        PredictTemperaturesConfig(model="m", text="t", precision="int8")
