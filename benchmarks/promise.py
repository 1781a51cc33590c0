"""Does training deliver what the headroom test promises, and does the report say the same? Three families, two texts.

    .venv/bin/python -m benchmarks.promise --text bbc.jsonl.zst --shifted reuters.jsonl.zst --output promise

For every seed three models are trained on the first text: a GPT-2 with byte-level BPE whose documents are separated by its
end-of-text token, a LLaMA with a Unigram tokenizer whose documents begin with `<s>` and never end with `</s>`, and a Qwen2
with BPE whose end token, that of a chat, it has never seen. Each reads what it has sampled itself, on which it is
calibrated, and text of another kind. On each, the headroom test runs as `jobs.calibrate headroom` does. Then TempNets learn
on four fifths of the documents by the settings of the command that the test prints, in a loop of this file, and the figures
of a run's report judge them on the other fifth. Figures are thousandths of a nat per token, ± 95 % over documents.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.measure import print_setting, print_table
from benchmarks.small_models import minimise
from jobs.engine.report import beats
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.job import Question, figures, milli, read_measured
from jobs.scoring.headroom.texts import Measurer, TextMeasurement
from jobs.scoring.text_parts import read_parts, token_arrays
from jobs.scoring.units import UnitStore
from pipelines.archives import list_archives
from pipelines.text.packing import PackingConfig
from pipelines.text.reading import readable_documents
from pipelines.text.tokenization import document_start_id, load_tokenizer, train_bpe
from tempnet import TempNet, TempNetConfig
from tempnet.baselines import compare_sums
from tempnet.headroom.features import Tokens
from tempnet.headroom.gains import DocumentSums
from tempnet.headroom.profile import Profiles
from tempnet.headroom.run import CONSTANT, run_headroom_test
from tempnet.intervals import Interval
from tempnet.models.output_head import output_weight
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.linear import linear_language_model_loss

FAMILIES = ("gpt2", "llama", "qwen2")
TEXTS = ("own", "other")
INPUTS = ("hidden", "both")
TOKENS_PER_DOCUMENT, TOKENS_PER_SAMPLE = 192, 20
CONTEXT_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Texts and sizes."""

    text: str
    """Archive of documents to train the models on."""
    shifted: str
    """Archive of documents of another kind."""
    output: str
    """Directory of models, texts, runs and results; what it holds is not made again."""
    families: tuple[str, ...] = FAMILIES
    texts: tuple[str, ...] = TEXTS
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the models, their samples and the TempNets."""
    vocab_size: int = 512
    """Size of the vocabularies."""
    num_steps: int = 250
    num_samples: int = 4000
    """Number of texts that a model samples."""
    num_shifted: int = 200
    """Number of documents of the other kind."""
    num_tempnet_steps: int = 400
    """Number of training steps of a TempNet, on 2 048 tokens each."""


@dataclass(frozen=True, slots=True)
class World:
    """A world's tokens, measured with its model."""

    tokens: Tokens
    targets: Tensor
    documents: Tensor
    weight: Tensor

    def part(self, rows: Tensor) -> Tokens:
        """Return some of the tokens."""
        profiles = Profiles(self.tokens.profiles.values[rows].double(), self.tokens.profiles.target[rows].double())
        return Tokens(profiles, self.tokens.margin[rows], self.tokens.maximum[rows], self.tokens.hidden[rows])


def documents_of(path: str) -> Iterator[str]:
    """Yield the documents of an archive, in words and punctuation marks of lower case."""
    for archive in list_archives(path):
        for document in readable_documents(path, archive, "text", Counter(), []):
            yield " ".join(re.findall(r"\w+|[^\w\s]", document.text.lower()))


def make_tokenizer(family: str, texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a family."""
    if family == "gpt2":
        return train_bpe(texts, vocab_size)
    if family == "qwen2":
        plain = Tokenizer(models.BPE())
        plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        special = ["<|endoftext|>", "<|im_end|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        plain.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
            ),
        )
        return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    unigram.train_from_iterator(
        texts,
        trainers.UnigramTrainer(vocab_size=vocab_size, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    unigram.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=unigram, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_model(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a new model of two layers and width 64; what begins a document is its bos_token_id."""
    start = 0 if family == "qwen2" else document_start_id(tokenizer)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT_LENGTH, "bos_token_id": start, "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if family == "gpt2":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 172}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    return model


@torch.inference_mode()
def sample_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, number: int) -> list[str]:
    """Return texts that the model samples at τ = 1 and its tokenizer reads back as the same tokens.

    A text has TOKENS_PER_SAMPLE tokens, or ends where the model begins another document. Longer texts would hardly ever be
    read back as the tokens that were sampled.
    """
    start: int = model.config.bos_token_id
    first = torch.full((number, 1), start)
    any_model: Any = model
    out = any_model.generate(
        first, attention_mask=torch.ones_like(first), eos_token_id=None, pad_token_id=start, do_sample=True, top_k=0,
        max_new_tokens=TOKENS_PER_SAMPLE,
    )  # fmt: skip
    texts = []
    for ids in out[:, 1:].tolist():
        own = ids[: ids.index(start)] if start in ids else ids
        text = str(tokenizer.decode(own, clean_up_tokenization_spaces=False))
        if tokenizer(text, add_special_tokens=False)["input_ids"] == own and len(own) > 8:
            texts.append(text)
    return texts


def make_world(job: Arguments, family: str, seed: int, directory: Path) -> None:
    """Write a model and its two texts."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    texts = list(documents_of(job.text))
    tokenizer = make_tokenizer(family, texts, job.vocab_size)
    model = make_model(family, tokenizer)
    start = model.config.bos_token_id
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in [start, *ids]])
    generator = torch.Generator().manual_seed(seed)

    def loss_of_blocks() -> Tensor:
        starts = torch.randint(len(stream) - CONTEXT_LENGTH - 1, (16, 1), generator=generator)
        block = stream[starts + torch.arange(CONTEXT_LENGTH + 1)]
        logits = model(input_ids=block[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())

    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=5e-3, total_steps=job.num_steps, pct_start=0.05)
    loss = minimise(loss_of_blocks, model, cycle, num_steps=job.num_steps, rate=5e-3, beta2=0.95, weight_decay=0.1)
    samples = sample_texts(model, tokenizer, job.num_samples)
    print(f"{family}, seed {seed}: loss {loss:.3f}, {len(samples)} texts of its own", flush=True)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    others = [text for text in documents_of(job.shifted) if len(text) > 400][: job.num_shifted]
    for name, found in (("own", samples), ("other", others)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in found)
        (directory / f"{name}.jsonl").write_text(lines)


def measure(job: Arguments, directory: Path, text: str) -> tuple[World, TextMeasurement, Tensor]:
    """Measure a text with a model as `jobs.calibrate headroom` does; return its tokens, and which are held out, too."""
    config = Headroom(
        model=str(directory / "model"), text=str(directory / f"{text}.jsonl"), tokens_per_document=TOKENS_PER_DOCUMENT
    )
    measurement = TextMeasurement.resolve(config)
    measurer, output = Measurer(measurement), directory / text
    store = UnitStore(str(output))
    store.claim(measurement.record())
    files, parts = [], read_parts(measurement, 0, str(output))
    ids: list[np.ndarray] = []
    for part in parts:
        ids += token_arrays(part.table["token_ids"])
        store.write(measurer(part).files)
        files.append(part.file)
    question = measurement.question(str(output), files)
    tokens, documents = zip(*read_measured(str(output), files, with_end=question.with_end), strict=True)
    end = measurement.eos_id
    targets = []
    for values in ids:
        found = values[:TOKENS_PER_DOCUMENT].tolist() + [end] * (len(values) <= TOKENS_PER_DOCUMENT)
        targets += [target for target in found if question.with_end or target != end]
    weight, _ = output_weight(measurer._base)
    layout = PackingConfig.for_tokenizer(load_tokenizer(config.model), CONTEXT_LENGTH)
    others = {id(values) for values in replace(layout, documents="others").choose(ids)}
    is_held_out = torch.tensor([id(values) not in others for values in ids])
    every = torch.cat(documents)
    joined = Tokens.join(tokens, torch.arange(len(every)))._replace(
        hidden=torch.cat([part.hidden for part in tokens]).float()
    )
    world = World(joined, torch.tensor(targets), every, weight.detach().float())
    return world, measurement, is_held_out[every]


def train_tempnet(world: World, rows: Tensor, kind: str, *, tau_max: float, num_steps: int, seed: int) -> TempNet:
    """Train a TempNet by the settings of the preset `frozen-small` and of the command that the test prints."""
    torch.manual_seed(seed)
    vocab_size, state_size = world.weight.shape
    is_both = kind == "both"  # logits without the L2 norm would saturate the first layer
    options: dict[str, Any] = {"rho": 0.0, "tau_max": tau_max, "normalize_input": is_both, "pooling": "linear"}
    network = TempNet(TempNetConfig.for_hidden(vocab_size, state_size, with_logits=is_both, **options))
    config = TemperatureLossConfig(name="proper", rho=0.0, tau_max=tau_max)

    def loss() -> Tensor:
        chosen = rows[torch.randint(len(rows), (2048,))]
        hidden, targets = world.tokens.hidden[chosen], world.targets[chosen]
        return linear_language_model_loss(hidden, world.weight, targets, config, network).loss

    linear = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda number: 1 - number / num_steps)
    minimise(loss, network, linear, num_steps=num_steps, rate=1e-2)
    return network


@torch.no_grad()
def report(world: World, rows: Tensor, network: TempNet) -> dict[str, float]:
    """Return the figures of the report of a run that validates on some tokens (`jobs.tasks.language_model.validation`)."""
    tau = torch.cat(
        [network(state @ world.weight.T, state) for state in world.tokens.hidden[rows].split(2048)]
    ).double()
    profiles, documents = world.part(rows).profiles, world.documents[rows]
    sums = DocumentSums(int(world.documents.max()) + 1)
    sums.add_profiles(profiles, documents)
    sums.add("own", profiles, documents, -tau.log())
    best = math.exp(-sums.profiles.best_constant())
    figures = compare_sums(
        sums.losses["own"], sums.at_constant, sums.counts, best_constant=best, mean=tau.mean().item(), tau=tau
    )
    return {f"cross_entropy/{name}": value for name, value in figures.items()}


def run_cell(job: Arguments, family: str, seed: int, text: str) -> dict[str, Any]:
    """Return the figures of a model on a text: the promise, and what TempNets make of it on the held-out fifth."""
    torch.set_num_threads(1)
    directory = Path(job.output) / f"{family}-{seed}"
    file = directory / f"{text}.json"
    if file.exists():
        known: dict[str, Any] = json.loads(file.read_text())
        return known
    if not (directory / "other.jsonl").exists():
        make_world(job, family, seed, directory)
    world, measurement, is_held_out = measure(job, directory, text)
    every = torch.arange(len(world.targets))
    test = run_headroom_test(
        lambda: ((world.part(part), world.documents[part]) for part in every.split(4096)),
        int(world.documents.max()) + 1,
        num_folds=measurement.config.folds,
    )
    values = figures(test, Question(files=[]), least_gain=measurement.config.least_gain)
    gain = test.sums.gain(test.best_features, CONSTANT)
    known = {
        "headroom": list(gain),
        "verdict": values["verdict"].partition(":")[0],
        "best_constant": test.tau,
        "tau_max": test.wanted_tau_max,
        "cross_entropy": values["cross_entropy"],
        "gain_of_constant": values["best_constant"]["gain"],
    }
    for kind in INPUTS:
        network = train_tempnet(
            world, every[~is_held_out], kind, tau_max=test.wanted_tau_max, num_steps=job.num_tempnet_steps, seed=seed
        )
        known[kind] = report(world, every[is_held_out], network)
    file.write_text(json.dumps(known, indent=1))
    return known


def realised(known: dict[str, Any], kind: str) -> Interval:
    """Return what a report says that a TempNet gains over the best constant."""
    gain = known[kind]
    return Interval(gain["cross_entropy/best_constant_gain"], gain["cross_entropy/best_constant_gain_half_width"])


def row_of(known: dict[str, Any], name: str) -> list[str]:
    """Return the cells of a row of the table; promise and report agree if their intervals overlap."""
    best = max(INPUTS, key=lambda kind: realised(known, kind).mean)
    beats_both = all(beats(known[best], "cross_entropy", name) for name in ("best_constant", "mean_shift"))
    promised, found = Interval(*known["headroom"]), realised(known, best)
    agree = abs(promised.mean - found.mean) <= promised.half_width + found.half_width
    return [
        name,
        f"{milli(promised)}, {known['verdict']}",
        *(milli(realised(known, kind)) for kind in INPUTS),
        "beats both constants" if beats_both else "does not",
        f"{100 * found.mean / promised.mean:.0f} %" if known["verdict"] == "worth it" else "",
        f"{known['best_constant']:.2f}",
        f"{known['tau_max']:g}",
        "yes" if agree else "NO",
    ]


def main(job: Arguments) -> None:
    """Print the table."""
    print_setting(job, "torch", "transformers", "tokenizers")
    rows = {}
    for seed, family, text in itertools.product(job.seeds, job.families, job.texts):
        name = f"{family}, {text} text, seed {seed}"
        rows[family, text, seed] = row_of(run_cell(job, family, seed, text), name)
        print(" | ".join(rows[family, text, seed]), flush=True)
    titles = [
        "model, text", "headroom", *(f"`proper`, {kind}" for kind in INPUTS), "report", "of the promised",
        "best constant", "τ_max", "agree",
    ]  # fmt: skip
    print_table(titles, [rows[key] for key in sorted(rows)])


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
