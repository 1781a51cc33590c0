"""Does a frequent concept get a high or a low temperature? Rank correlations of τ with true concept frequency over ρ.

    .venv/bin/python -m benchmarks.concept_frequency --base runs/clip-cc3m-clip-small/export \\
        [--tempnets 7=runs/a/export 4=runs/b/export] [--figure frequency.png]

The sample images are labelled with the frequency of their concept. For every ρ, the oracle's τ* of an anchor is exact:
the minimum of the robust loss with all other samples of the training set as contrasts, on the embeddings of `--base`.
It is compared with the temperatures that TempNets trained at that ρ predict for the same samples from their own
encoders' embeddings, and with those that iSogCLR has learned (`--states ρ=checkpoint`). TempNet §4 and arXiv 2305.11965
claim that frequent concepts have a high τ. That can hold only while ρ is small compared with log(K/n), where K is the
number of samples and n the number of contrasts that tie with the best.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro
from torch import Tensor

from jobs.studies.reproduction.scoring import read_stored_temperatures
from jobs.tasks.presets.clip import SAMPLE_IMAGES
from pipelines.images.archives import list_image_archives
from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.pairs import PairSource
from pipelines.images.temperature_table import read_numbers
from pipelines.text.tokenization import load_tokenizer
from tempnet.models.dual_encoder import DualEncoder, load_pair_tempnets
from tempnet.oracle import optimal_temperature
from tempnet.statistics import spearman

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_NUM_AT_A_TIME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    base: str
    """Directory of a trained dual encoder, on whose embeddings the oracle is computed."""
    manifest: str
    """Directory of the prepared training pairs, as `jobs.prepare_images` prints it."""
    train: str = f"{SAMPLE_IMAGES}/train"
    """Directory of the tars, whose JSON files contain `concept_frequency`."""
    rho: tuple[float, ...] = (0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    tempnets: tuple[str, ...] = ()
    """Models with TempNets as ρ=export, or NAME:ρ=export for a curve with its own name."""
    states: tuple[str, ...] = ()
    """Checkpoint directories of iSogCLR runs as ρ=checkpoint."""
    num_anchors: int = 2000
    """Number of samples that temperatures are computed for."""
    tau_max: float = 1.0
    """Upper bound of the oracle's τ; the default is high enough for small ρ."""
    num_negatives: int = 0
    """Number of negatives of a sample in a training batch, whose logarithm is marked in the figure. 0: no mark."""
    figure: str = ""
    """PNG file to write the figure to. Empty: no figure."""


@torch.no_grad()
def embed(model: str, source: PairSource, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings (n, d) of the images with these numbers, and those of their captions."""
    encoder = DualEncoder.from_pretrained(model)
    captions, _ = source.captions()
    images, texts = [], []
    for part_of_numbers in numbers.split(_NUM_AT_A_TIME):
        part = part_of_numbers.tolist()
        images.append(encoder.encode_images(torch.from_numpy(source.read_images(part))))
        tokens = source.encoder.encode([captions[index] for index in part])
        texts.append(
            encoder.encode_texts(*(torch.from_numpy(tokens[name]) for name in ("input_ids", "attention_mask")))
        )
    return torch.cat(images), torch.cat(texts)


def solve_temperatures(queries: Tensor, contrasts: Tensor, anchors: Tensor, rho: float, tau_max: float) -> Tensor:
    """Return τ* (n,) of the anchors, whose contrasts are all rows of `contrasts` except their own."""
    parts = []
    for part in anchors.split(_NUM_AT_A_TIME):
        scores = queries[part] @ contrasts.T
        others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, part[:, None], False)
        parts.append(optimal_temperature(scores[others].view(len(part), -1), rho, 0.001, tau_max))
    return torch.cat(parts)


def parse_runs(values: tuple[str, ...], name: str) -> list[tuple[str, float, Path]]:
    """Parse arguments of the form `ρ=path` or `NAME:ρ=path` into name, ρ and path; `name` is the default."""
    runs = []
    for value in values:
        if not (match := re.fullmatch(r"(?:(.+):)?([\d.]+)=(.+)", value)):
            raise SystemExit(f"{value!r} is neither ρ=path nor NAME:ρ=path")
        runs.append((match[1] or name, float(match[2]), Path(match[3])))
    return runs


def main(arguments: Arguments) -> None:
    """Measure, print a table, and draw the figure."""
    manifest = ImageManifest.load(arguments.manifest)
    encoder = DualEncoder.from_pretrained(arguments.base).config
    tokenizer = load_tokenizer(f"{arguments.base}/text_encoder", needs_eos=False)
    source = PairSource(
        manifest=manifest, tokenizer=tokenizer, image_size=encoder.image_size, num_text_tokens=encoder.num_text_tokens
    )
    keys = [key for number in range(len(manifest.shards)) for key in read_index(manifest, number)["key"].to_pylist()]
    frequencies = dict(read_numbers(arguments.train, list_image_archives(arguments.train), "concept_frequency"))
    frequency = torch.tensor([frequencies[key] for key in keys], dtype=torch.float64)
    rng = np.random.default_rng(0)
    anchors = torch.from_numpy(np.sort(rng.choice(len(keys), min(arguments.num_anchors, len(keys)), replace=False)))
    image, text = embed(arguments.base, source, torch.arange(manifest.num_images))
    curves: dict[str, dict[float, float]] = {}

    def add(name: str, rho: float, tau: Tensor) -> None:
        curves.setdefault(name, {})[rho] = float(spearman(tau, frequency[anchors]))
        print(f"| {name} | {rho:g} | {float(tau.mean()):.4f} | {curves[name][rho]:+.3f} |", flush=True)

    # §1: τ falls to its lower bound when ρ approaches log(K/n), where n counts the contrasts that tie with the best:
    # those of the anchor's own concept.
    nears = (len(keys) / frequency[anchors]).log()
    low, middle, high = (float(nears.quantile(share)) for share in (0.05, 0.5, 0.95))
    print(f"log(K/n) of the anchors' concepts: 5 % {low:.2f}, median {middle:.2f}, 95 % {high:.2f}")
    print("| temperatures | ρ | mean τ | Spearman(τ, concept frequency) |\n|---|---|---|---|")
    for rho in arguments.rho:
        add("oracle, images", rho, solve_temperatures(image, text, anchors, rho, arguments.tau_max))
        add("oracle, captions", rho, solve_temperatures(text, image, anchors, rho, arguments.tau_max))
    for name, rho, path in parse_runs(arguments.tempnets, "TempNet"):
        own_image, own_text = embed(str(path), source, anchors)
        networks = load_pair_tempnets(path)
        with torch.no_grad():
            add(f"{name}, images", rho, networks[0](own_image))
            add(f"{name}, captions", rho, networks[1](own_text))
    for name, rho, path in parse_runs(arguments.states, "iSogCLR"):
        tau = torch.from_numpy(read_stored_temperatures(str(path), manifest.num_pairs))
        add(f"{name}, images", rho, tau[0, anchors])
        add(f"{name}, captions", rho, tau[1, anchors])
    if arguments.figure:
        draw(Path(arguments.figure), curves, arguments.num_negatives)


def draw(path: Path, curves: Mapping[str, Mapping[float, float]], num_negatives: int) -> None:
    """Draw a line per curve: the line style shows the kind of temperature, the colour the modality."""
    kinds = dict.fromkeys(name.split(", ")[0] for name in curves)
    strokes = dict(zip(kinds, itertools.cycle(("-", "--", "-.", ":")), strict=False))
    colours = {"images": "tab:blue", "captions": "tab:orange"}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, values in curves.items():
        kind, modality = name.split(", ")
        rhos, heights = zip(*sorted(values.items()), strict=True)
        axes.plot(rhos, heights, marker="o", markersize=4, linestyle=strokes[kind], color=colours[modality], label=name)
    axes.axhline(0.0, color="black", linewidth=0.8)
    if num_negatives:
        axes.axvline(math.log(num_negatives), color="grey", linewidth=0.8, label=f"log({num_negatives} negatives)")
    axes.set(xlabel="ρ, nats", ylabel="Spearman(τ, concept frequency)")
    figure.legend(fontsize=8, ncols=2, loc="outside lower center")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
