"""Test that what cannot work is refused before Ray starts, in one line with field and value, and what can is planned."""

from __future__ import annotations

import json
import shlex
import tarfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from jobs.engine.command_line import parse_preset
from jobs.engine.fields import recorded_values, with_fields
from jobs.engine.launch import make_plan
from jobs.studies.cross_validation import make_cross_validation
from jobs.tasks.classifier.task import read_data
from jobs.tasks.config import check_sizes
from jobs.tasks.dual_encoder.task import build_encoder
from jobs.tasks.images import preparation
from jobs.tasks.presets import language_models
from pipelines.images.prepare import check_source
from pipelines.text.tokenization import train_bpe, train_wordpiece
from tempnet import TempNet, TempNetConfig
from tempnet.models.towers import random_tower

TEXT = " ".join(f"word{number}" for number in range(40))
SHARED = " --run.storage runs --tracking.no-enabled --dry-run "
TEXTS = " --data.train text --data.validation text --data.tokenizer "
LANGUAGE_MODEL = f"train_lm gpt2-scratch-small {TEXTS} bpe --temperature.target-entropy 2" + SHARED
PAIRS = (
    "train_clip clip-cc3m-tempnet-small --data.train images --data.validation images --data.tokenizer wordpiece"
    + SHARED
)
IMAGES = "train_images simclr-cifar10-small --data.train images --data.validation images" + SHARED
SENTENCES = f"train_sentences declutr-small-small {TEXTS} wordpiece" + SHARED
STREAMING = SENTENCES + "--data.prepare streaming "
CLASSIFIER = (
    "train_classifier triple-entropy-small --data.directory= --data.num-examples 0 --data.file films.tsv "
    "--data.tokenizer wordpiece --optimizer.batch-size 16 --model.path= --model.hidden-size 16 --model.num-layers 1 "
    "--model.num-heads 2" + SHARED
)
EIGHT_BITS = "--model.path x --workers.precision bf16 --model.precision"
DISTIL = "--temperature.loss distil --distillation.teacher x"
NEEDS_ALL = (
    "keeps state of every document, … data.prepare = 'streaming' … choose one of clip, clip_fixed, temperature_free"
)

REFUSED: dict[str, dict[str, str]] = {
    LANGUAGE_MODEL: {
        "--run.num-steps 0": "run.num_steps = 0 must be positive",
        "--run.name a/b": "run.name = 'a/b' must be a plain file name",
        f"--run.name {256 * 'x'}": "must be a plain file name of at most 200 bytes",
        "--data.tokenizer wordpiece": "no end-of-text token",
        "--run.seed -1": "run.seed = -1 must not be negative",
        "--optimizer.batch-size 15": "optimizer.batch_size = 15 is not divisible by workers.num_workers = 2",
        "--optimizer.micro-batch-size 3": "not divisible by optimizer.micro_batch_size = 3",
        "--optimizer.micro-batch-size 4 --workers.micro-batch auto": "optimizer.micro_batch_size = 4, which auto chooses",
        "--optimizer.learning-rate-base inf": "optimizer.learning_rate_base = inf must be positive and finite",
        "--optimizer.max-grad-norm nan": "optimizer.max_grad_norm = nan must not be negative",
        "--optimizer.beta1 1": "optimizer.beta1 = 1 must be below 1",
        "--optimizer.rest-share-tempnet 0.6 --optimizer.warmup-share-tempnet 0.5":
            "optimizer.rest_share_tempnet = 0.6 leaves the TempNet no steps after its warm-up of 0.5",
        "--workers.num-threads -3": "workers.num_threads = -3 must not be negative",
        "--workers.zero-stage 0 --workers.offload-optimizer": "needs workers.zero_stage 1, 2 or 3",
        "--workers.local": "workers.num_workers = 2 must be 1 with workers.local",
        "--workers.local --workers.num-workers 1 --data.prepare streaming":
            "data.prepare = 'streaming' needs Ray, which workers.local = True does without",
        "--workers.local --workers.num-workers 1 --data.reader-resources reader=1": "data.reader_resources = ",
        "--workers.memory-gib -1": "workers.memory_gib = -1.0 must be positive",
        "--workers.memory-gib .1": "more than workers.memory_gib = 0.1",
        "--validation.num-blocks -1": "validation.num_blocks = -1 must not be negative",
        "--tracking.max-model-gib -1": "tracking.max_model_gib = -1 must not be negative",
        "--tracking.enabled --tracking.uri mlflow:5000": "tracking.uri = 'mlflow:5000' is no address of MLflow: give http://",
        "--tracking.enabled --run.storage s3://bucket/runs": "tracking.uri is not given",
        "--run.storage s3://bucket/runs?region=eu": "run.storage = 's3://bucket/runs?region=eu' must have no query: set AWS",
        "--data.max-bad-share 1.5": "data.max_bad_share = 1.5 must lie in",
        "--data.context-length 1": "data.context_length = 1 must be at least 2",
        "--data.validation foreign": "data.validation: … config.json",
        "--data.tokenizer text": "tokenizer = … text' cannot be loaded",
        "--model.freeze True": "model.freeze = True needs model.path",
        "--model.num-heads 7": "not divisible by num_heads = 7",
        "--model.architecture llama --model.dropout .1": "model.dropout = 0.1 is supported only for model.architecture",
        "--model.path nowhere/nothing": "model.path = nowhere/nothing is no Transformers model",
        "--model.path few-tokens": "tokens, more than the vocabulary of 100",
        "--model.path few-positions": "data.context_length = 128 is more than the 64 positions",
        "--model.path foreign": "data.tokenizer = … is not the tokenizer of model.path = … foreign",
        "--model.precision int8": "model.precision = int8 is for a frozen base (model.freeze)",
        "--model.path x --model.precision fp8 --workers.precision fp32": "must be bf16, not fp32",
        f"{EIGHT_BITS} int8 --workers.zero-stage 3": "int8: weights in eight bits cannot be divided among workers by",
        f"{EIGHT_BITS} int8 --model.whole-export": "model.whole_export must be False, because an export has no",
        "--model.path x --model.num-gpus 2": "model.num_gpus = 2 must be 1, or more with workers.use_gpu and",
        "--model.path x --workers.activation-checkpointing":
            "workers.activation_checkpointing = True saves the memory of a base model's",
        "--temperature.path saved": "temperature.path = … saved' was saved with … rho=1.0, … but this run needs",
        "--temperature.loss reward": "python -m jobs.train_reward",
        "--temperature.loss drro": "temperature.loss = 'drro' is unknown: choose one of ce",
        "--temperature.target-entropy None": "both None: ρ can be calibrated only on a model",
        "--temperature.rho 3 --temperature.target-entropy 4": "target_entropy = 4.0: give one of them",
        "--temperature.rho 10 --temperature.target-entropy None": "temperature.rho: rho = 10 is outside",
        "--temperature.target-entropy 9": "target_entropy = 9 nats is impossible",
        "--temperature.tau-min 3": "0 < tau_min < tau_max",
        "--temperature.target-tau 0.8 --temperature.loss ce": "choose temperature.loss dro",
        "--temperature.target-tau 0.8 --temperature.rho-gain 0": "temperature.rho_gain = 0.0 must be positive",
        "--temperature.target-tau 0.8 --model.path x": "on a frozen base the calibrated ρ is final",
        "--temperature.loss distil": "and distillation.teacher = '': the loss distil needs a teacher to learn from",
        "--distillation.teacher x": "loss = 'dro' and distillation.teacher = 'x': the loss distil needs a teacher",
        f"{DISTIL} --workers.zero-stage 3": "workers.zero_stage = 3 divides the model's weights, which the loss distil reads",
        f"{DISTIL} --temperature.rho None --temperature.target-entropy None":
            "distillation.keep = 'entropy' needs temperature.target_entropy or temperature.rho",
    },
    PAIRS: {
        "--workers.micro-batch auto": "does not go together with a task without micro-batches",
        "--workers.compile on": "workers.compile = 'on' is for language models",
        "--workers.memory-gib 1": "workers.memory_gib = 1.0 is for language models",
        "--optimizer.micro-batch-size 32": "optimizer.micro_batch_size = 32: a contrastive loss compares all samples",
        "--workers.zero-stage 3": "workers.zero_stage = 3",
        "--workers.activation-checkpointing": "workers.activation_checkpointing = True would run the batch",
        "--temperature.loss simclr": "temperature.loss = 'simclr' is unknown: choose one of clip",
        "--temperature.loss sogclr_given": "temperature.target_tau = 0.02 steers the ρ of a robust loss",
        "--temperature.loss sogclr_given --temperature.target-tau None": "the loss sogclr_given needs a table",
        "--temperature.loss sogclr_given --temperature.target-tau None --temperature.table none":
            "temperature.table = … not exist",
        "--temperature.loss isogclr": "tempnet or tempnet_neuclip (contrastive)",
        "--temperature.target-tau 0.06": "target_tau = 0.06 must lie between τ₀ = 0.001 and τ_max = 0.05",
        "--temperature.input-shift mean": "temperature.input_shift = mean shifts logits",
        "--temperature.tau-min 0.1": "0 < tau_min < tau_max does not hold",
        "--temperature.gamma 0": "gamma = 0 must lie in (0, 1]",
        "--model.freeze": "model.freeze = True needs model.path",
        "--model.text-num-heads 7": "not divisible by text_num_heads = 7",
        "--model.image-depths 1 1": "must be equally many positive numbers",
        "--model.image-size 100000": "model.image_size = 100000 is above 4096: as float32, one view alone takes 111",
        "--model.image-size 0": "model.image_size = 0 must be positive",
        "--model.image-path text": "holds no Transformers model",
        "--model.path text": "holds no",
        "--model.image-path vit --model.image-size 7": "takes no images of 7 × 7: ",
        "--model.path encoder --model.freeze --model.image-size 32":
            "model.image_size = 32, but model.path = … was made for 48",
        "--model.path encoder --model.freeze --temperature.loss clip --temperature.target-tau None":
            "leaves nothing to train with temperature.loss = 'clip'",
        "--data.validation-captions no.json": "data.validation: … no.json",
        "--data.tokenizer images": "tokenizer = … images' cannot be loaded",
        "--data.num-text-tokens 2": "data.num_text_tokens = 2 must exceed the 2 special tokens",
        "--data.caption-noise 1.5": "data.caption_noise = 1.5 must lie in [0, 1]",
        "--data.min-crop-scale 0": "data.min_crop_scale = 0.0 must be positive",
        "--data.augmentation-magnitude 11": "data.augmentation_magnitude = 11 must lie in [0, 10]",
    },
    IMAGES: {
        "--data.label=": "data.label is empty: give folder, cls, or the name of a field of the .json",
        "--data.grey-probability 2": "data.grey_probability = 2 must lie in",
        "--validation.regularisation 0": "validation.regularisation = 0.0 must be positive",
        "--temperature.loss cyclip": "temperature.loss = 'cyclip' is for images with captions",
        "--workers.activation-checkpointing": "workers.activation_checkpointing = True is for text models",
        "--model.path wordpiece": "wordpiece",
    },
    SENTENCES: {
        "--data.num-anchors 0": "data.num_anchors = 0 must be positive",
        "--data.min-length 40": "data.max_length = 32 is below min_length = 40",
        "--data.min-num-tokens 95": "data.min_num_tokens = 95 is below (num_anchors + 1)·max_length = 96",
        "--data.mask-share 1.2": "data.mask_share = 1.2 must lie in [0, 1]",
        "--data.train-share 0": "data.train_share = 0.0 must be positive",
        "--data.tokenizer bpe": "data.tokenizer … has no pad_token: use the tokenizer of a masked language model",
        "--temperature.loss tempnet --temperature.target-tau 0.02":
            "target_tau = 0.02: ρ is steered for language models and for images with captions",
        "--objective.contrastive-weight 0 --objective.mlm-weight 0": "leaves nothing to learn",
        "--objective.mlm-weight -1": "objective.mlm_weight = -1.0 must not be negative",
        "--workers.zero-stage 3": "workers.zero_stage = 3",
        "--validation.num-documents -1": "validation.num_documents = -1 must not be negative",
        "--model.hidden-size 130": "model.hidden_size = 130 is not divisible by model.num_heads = 4",
        "--model.path short": "32 with 2 special tokens is more than the 29 positions … at most 27",
        "--model.path ./nothing": "model.path = … nothing' is missing",
        "--model.path text": "model.path = … text' holds no encoder with an MLM head",
    },
    STREAMING: {
        "--temperature.loss sogclr": f"temperature.loss = 'sogclr' {NEEDS_ALL}",
        "--temperature.loss tempnet_in_batch":
            "temperature.projection = True … data.prepare = 'streaming' … choose temperature.projection False, or",
        "--optimizer.batch-size 1 --workers.num-workers 1 --data.num-anchors 1":
            "optimizer.batch_size = 1: the loss clip_fixed needs a global batch of at least 2 pairs, not 1",
        "--data.num-parts-ahead 0": "data.num_parts_ahead = 0 must be positive",
        "--data.prepare-cpus -1": "data.prepare_cpus = -1.0 must be positive",
        "--data.reader-resources reader": "data.reader_resources",
    },
    CLASSIFIER: {
        "--grid.num-centers 0": "grid.num_centers = 0 must be positive",
        "--grid.beta 0.9 1.1": "grid.beta = 1.1 must lie in [0, 1]",
        "--grid.gamma 0": "grid.gamma = 0 must be positive and finite",
        "--grid.seeds 1 1": "grid.seeds names 1 twice",
        "--grid.num-folds 1": "grid.num_folds = 1 must be at least 2",
        "--run.seed 3": "run.seed = 3: the seeds of a cross-validation are grid.seeds",
        "--optimizer.micro-batch-size 4": "optimizer.micro_batch_size = 4: the mean over the tokens",
        "--optimizer.batch-size 64": "optimizer.batch_size = 64 is more than the 48 sentences",
        "--workers.zero-stage 3": "workers.zero_stage = 3",
        "--centers.learning-rate 0": "centers.learning_rate = 0.0 must be positive",
        "--model.path nowhere": "model.path = 'nowhere' holds no text model",
        "--data.tokenizer=": "data.tokenizer is empty, and there is no model.path",
        "--data.tokenizer bpe": "data.tokenizer = … bpe' has no padding token",
        "--data.directory x": "give either data.directory, in SentEval's layout, or data.file",
        "--data.tasks CR": "data.tasks = ('CR',) is for data.directory, and data.file is given",
        "--data.num-examples -1": "data.num_examples = -1 must not be negative",
        "--data.num-examples 61": "data.num_examples = 61 is more than the 60 sentences of films",
        "--data.file rare.tsv":
            "grid.num_folds = 5: class 'odd' of rare has 3 of the 63 sentences; choose at most 3",
        "--data.file single.tsv": "class 'odd' of single has 1 of the 61 sentences, too few to be trained on and held out",
        "--data.classes good poor": "data.file: … no sentence of the class poor",
        "--data.file alike.tsv": "data.file: … holds 1 class (good)",
        "--data.file broken.tsv": "broken: 2 of 62 lines … broken.tsv:61",
        "--data.file nothing.tsv": "data.file: … nothing.tsv",
        "--data.file= --data.directory text": "data.directory: … holds no folder of MR",
        "--data.file= --data.directory downstream": "data.directory: … custrev.neg",
    },
    "sweep gpt2-rho-lr-small --dry-run ": {"--base.run.num-steps 0": "run.num_steps = 0 must be positive"},
}  # fmt: skip
"""Maps each command to what is refused with it: options → what the message says, `…` for anything."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for name in ("text", "images", "downstream/CR"):
        (directory / name).mkdir(parents=True)
    (directory / "text" / "a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    with tarfile.open(directory / "images" / "0.tar", "w") as tar:
        Image.new("RGB", (8, 8)).save(directory / "a.jpg")
        (directory / "a.txt").write_text("a black square")
        for name in ("a.jpg", "a.txt"):
            tar.add(directory / name, name)
    films = [f"{'good' if number % 3 else 'bad'}\tfilm number {number}" for number in range(60)]
    more = {"films": [], "rare": ["odd\tone", "odd\ttwo", "odd\tthree"], "single": ["odd\tone"], "broken": ["bad"] * 2}
    for name, lines in more.items():
        (directory / f"{name}.tsv").write_text("\n".join([*films, *lines]))
    (directory / "alike.tsv").write_text("good\tx\ngood\ty\n")
    words = [TEXT, "a black square", *films]
    tokenizer = train_wordpiece(words, 110)
    tokenizer.save_pretrained(directory / "wordpiece")
    train_bpe(words, 400).save_pretrained(directory / "bpe")
    gpt2: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": 0}
    for name, *numbers in (("few-tokens", 100, 128), ("few-positions", 400, 64), ("foreign", 400, 128)):
        config = AutoConfig.for_model("gpt2", **gpt2, **dict(zip(("vocab_size", "n_positions"), numbers, strict=True)))
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
    train_bpe(["the words of another language"] * 8, 300).save_pretrained(directory / "foreign")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.for_model("roberta", vocab_size=500, max_position_embeddings=30, pad_token_id=0, **sizes)
    AutoModelForMaskedLM.from_config(config).save_pretrained(directory / "short")
    TempNet(TempNetConfig.for_logits(400, rho=1.0)).save_pretrained(directory / "saved")
    random_tower("vit", "image", image_size=32, patch_size=8, **sizes).save_pretrained(directory / "vit")
    build_encoder(parse(PAIRS), tokenizer).save_pretrained(directory / "encoder", tokenizer)
    return directory


@pytest.fixture(autouse=True)
def inside(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in the directory of the data, where starting Ray is an error."""
    monkeypatch.chdir(data)
    for name in ("TEMPNET_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def init(**options: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", init)
    yield
    assert not (data / "runs").exists()


def parse(command: str) -> Any:
    """Return the configuration that a command stands for."""
    job, *words = shlex.split(command)
    presets: Any = import_module(f"jobs.{job}").PRESETS
    return parse_preset(presets, words, job=job, purpose="")[0]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [(command, options, message) for command, rows in REFUSED.items() for options, message in rows.items()],
    ids=[f"{command.split()[0]} {options}" for command, rows in REFUSED.items() for options in rows],
)
def test_what_cannot_work_is_refused_before_ray_starts(
    command: str, options: str, message: str, refusal: Callable[..., str]
) -> None:
    said = refusal(*shlex.split(command + options))
    assert all(part in said for part in message.split(" … ")), said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--optimizer.batch-size 302", r"optimizer\.batch_size = 302 is more than the 300 documents of data\.train"),
        ("--temperature.rho 5.8", r"temperature\.rho = 5\.8 is not below log\(N − 1\)"),
        ("--temperature.num-prototypes 301", r"temperature\.num_prototypes = 301 is more than the 300 training doc"),
    ],
)
def test_what_the_documents_are_too_few_for_is_refused(options: str, message: str) -> None:
    config = parse(f"{SENTENCES} --temperature.loss tempnet --temperature.rho 3 {options}")
    batch = {"num_pairs_per_batch": config.num_pairs_per_batch, "noun": "documents"}
    with pytest.raises(ValueError, match=message):
        check_sizes(config, config.temperature, num_samples=300, **batch)
    check_sizes(config, config.temperature, num_samples=400, **batch)


PLANNED = {
    f"{LANGUAGE_MODEL} --workers.micro-batch auto": ["micro-batches as large as free memory allows"],
    LANGUAGE_MODEL: ["16 blocks × 128 = 2048 tokens: 2 workers × 1 micro-batches × 8 blocks", "target entropy 2.0000"],
    f"{LANGUAGE_MODEL} --temperature.loss ce": [" ce, τ = 1 for every token\n"],
    PAIRS: ["128 pairs: 2 workers × 64, each image against 127 captions", "normaliser global, τ in [0.001, 0.05], ρ = "],
    f"{PAIRS} --temperature.rho 7": ["ρ = 7 is not below log(127 negatives of a batch) = 4.84"],
    f"{PAIRS} --model.path encoder --model.freeze": ["(frozen)"],
    f"{PAIRS} --model.image-path vit --model.image-size 32": ["32"],
    IMAGES: ["clip_fixed, τ = 0.5", "128 images in two views: 2 workers × 64; each view against 254 others"],
    f"{SENTENCES} --temperature.loss tempnet --temperature.rho 3":
        ["1 × tempnet, ρ = 3 + 1 × MLM", "2 anchors of 8 to 32 tokens", "each anchor against 126 others"],
    f"{CLASSIFIER} --grid.num-centers 3 5": [
        "1 tasks × 3 settings × 4 seeds × 5 folds = 60", "ce, k3-gamma0.1-scale3.3-margin0.3-beta0.9, k5-gamma",
        "48 sentences to train on (25.0 epochs), 12 held out, 2 classes (bad, good)", "centres 160",
    ],
}  # fmt: skip


@pytest.mark.parametrize("command", PLANNED)
def test_a_plan_says_what_will_happen(command: str) -> None:
    make = make_cross_validation if command.startswith(CLASSIFIER) else make_plan
    text = make(parse(command)).describe()
    assert all(part in text for part in PLANNED[command]), text
    assert ("negatives of a batch" in text) == ("--temperature.rho 7" in command)


@pytest.mark.parametrize(
    "options",
    [
        "--temperature.loss tempnet_in_batch --temperature.no-projection",
        "--temperature.loss sogclr --objective.contrastive-weight 0",
        "--temperature.loss tempnet_neuclip --temperature.rho 0.5 --temperature.no-projection",
    ],
)
def test_what_needs_no_documents_first_can_be_streamed(options: str) -> None:
    ahead, streaming = (make_plan(parse(command + options)) for command in (SENTENCES, STREAMING))
    assert streaming.data_cpus == ahead.data_cpus + 1


def test_broken_lines_are_counted_if_they_are_few() -> None:
    work = make_cross_validation(parse(f"{CLASSIFIER} --data.max-bad-share 0.1 --data.file broken.tsv"))
    assert work.examples[0].data.problems == {"missing_field": 2}
    # A line whose label is none of the classes is left out, too.
    config = parse(f"{CLASSIFIER} --data.classes good bad --data.max-bad-share 0.1 --data.file single.tsv")
    task, examples = read_data(config.data, "")
    assert (task.problems, len(examples)) == ({"unknown_label": 1}, 60)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--data.train-splits train restval", {"train.jpg", "restval.jpg"}),
        ("--data.train-splits ''", {"train.jpg", "restval.jpg", "val.jpg"}),
    ],
)
def test_several_splits_and_none_are_read_by_training(options: str, expected: set[str], tmp_path: Path) -> None:
    images = [
        {"filename": f"{split}.jpg", "split": split, "sentences": [{"raw": split}]}
        for split in ("train", "restval", "val")
    ]
    (tmp_path / "karpathy.json").write_text(json.dumps({"images": images}))
    config = parse(f"{PAIRS} --data.train-captions {tmp_path}/karpathy.json {options}")
    _, captions, _ = check_source(preparation(config, "train"))
    assert captions is not None
    assert set(captions.captions) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gpt2-scratch-small --temperature.rho 3", (3.0, None)),
        ("gpt2-scratch-small --temperature.rho=3 --temperature.target_entropy=None", (3.0, None)),
        ("gpt2-scratch-small --temperature.rho None", (None, 4.9)),
        ("gpt2-scratch --temperature.target-entropy 4", (None, 4.0)),
        ("gpt2-scratch --temperature.target_entropy=None", (10.0, None)),
    ],
)
def test_a_given_rho_or_target_entropy_takes_the_place_of_the_other_one_of_the_preset(
    words: str, expected: tuple[float | None, float | None]
) -> None:
    temperature = parse(f"train_lm {words}").temperature
    assert (temperature.rho, temperature.target_entropy) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--data.tokenizer=", "t"),
        ("--data.tokenizer=own", "own"),
        ("--data.tokenizer= --model.path=m --model.freeze=False", "m"),
    ],
)
def test_a_student_that_begins_anew_takes_the_tokenizer_of_its_teacher(options: str, expected: str) -> None:
    words = f"train_lm gpt2-scratch-small --temperature.loss=distil --distillation.teacher=t {options}"
    assert parse(words).tokenizer == expected


def test_a_configuration_is_saved_read_again_and_overridden(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    words = f"frozen-small --model.path m --temperature.loss proper --run.name grüße --dry-run --save {file}"
    config, _ = parse_preset(language_models.PRESETS, words.split(), job="train_lm", purpose="")
    assert parse(f"train_lm --config {file}") == config
    assert config.has_measured_range
    changed = parse(f"train_lm gpt2-scratch-small --config={file} --optimizer.batch-size 8")
    assert changed == with_fields(config, {"optimizer.batch_size": 8})
    # What a run's directory holds can be given back as it is.
    recorded = tmp_path / "configuration.json"
    recorded.write_text(json.dumps(recorded_values(config)))
    assert recorded_values(parse(f"train_lm frozen-small --config {recorded}")) == recorded_values(config)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "base: {run: {num_steps: 7}, workers: {num_workers: 2:8}, temperature: {rho: .2e1}}\n"
        "sweep: {axes: [temperature.rho=1]}\n"
    )
    changed = parse(f"sweep frozen-rho-lr-small --config {sweep}")
    assert (changed.base.run.num_steps, changed.sweep.axes) == (7, ("temperature.rho=1",))
    # In YAML 1.1 a number to the base 60 and a text.
    assert (changed.base.workers.num_workers, changed.base.temperature.rho) == ("2:8", 2.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("temperature: {roh: 3}", "there is no field temperature.roh: did you mean temperature.rho"),
        ("optimizer.batch_size: many", "optimizer.batch_size = 'many' must be int"),
        ("data.reader_resources: reader=1", "data.reader_resources = 'reader=1' must be a list of str"),
        ("data.reader_resources: [1]", "data.reader_resources = (1,) must be a list of str"),
        ("optimizer.batch_size: -1", "optimizer.batch_size = -1"),
        ("temperature: {target_entropy: 4, rho: 1}", "target_entropy"),
        ("- a list", "must hold fields"),
        ("a: [", "is no YAML"),
        ("!!python/object/apply:os.system ['true']", "is no YAML"),
        ("tracking.uri: https://***@host", "the secret in tracking.uri was masked"),
        ("", "none.yaml: No such file"),
    ],
)
def test_a_configuration_file_is_refused_by_name(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ("run.yaml" if content else "none.yaml")
    if content:
        file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        parse(f"train_lm gpt2-scratch-small --config {file}")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt2-scrath-small", "did you mean gpt2-scratch-small"),
        ("gpt2-scratch-small --temperature.roh 3", "--temperature.rho"),
        ("gpt2-scratch-small --config=", "--config and --save need the name of a file"),
        ("gpt2-scratch-small --dry-run --save=", "--config and --save need the name of a file"),
        # What tyro refuses is shown with the help of the option.
        ("gpt2-scratch-small --run.num-steps many", "Number of optimizer steps."),
    ],
)
def test_what_is_misspelt_is_answered_with_near_names_and_help(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(f"train_lm {words}")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
