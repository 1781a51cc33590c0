"""The papers' claims about contrastive losses at small scale: several losses and seeds, with intervals, in one table.

    .venv/bin/python -m benchmarks.clip_claims [--losses clip sogclr tempnet] [--seeds 0 1 2] [--rho 7] [--noise 0 0.1]

Every row is `clip-cc3m-<loss>-small` of `jobs.train_clip` with a seed, on the sample images or on other data of the same
form; a run that is finished is not run again. The exported model (the best by validation) is scored on the test split.
Intervals are 95 % by Student's t over the seeds.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro

from benchmarks.intervals import interval
from jobs.clip.config import ClipConfig
from jobs.clip.data import pair_source
from jobs.clip.plan import make_plan
from jobs.clip.validation import RetrievalSet
from jobs.cluster import start_ray
from jobs.presets.clip import PRESETS, SAMPLE_IMAGES
from jobs.training.launch import train
from pipelines.image_manifest import ImageManifest
from pipelines.prepare_images import PrepareImagesConfig, prepare_images
from tempnet.contrastive.retrieval import recall
from tempnet.contrastive.world import World
from tempnet.models.dual_encoder import DualEncoder

LOSSES = ("clip", "cyclip", "sogclr", "isogclr", "tempnet", "temperature_free")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to run."""

    losses: tuple[str, ...] = LOSSES
    seeds: tuple[int, ...] = (0, 1, 2)
    rho: tuple[float, ...] = ()
    """ρ of isogclr and tempnet. Empty: the preset's."""
    noise: tuple[float, ...] = (0.0,)
    """Shares of noisy captions."""
    stop_gradient: tuple[bool, ...] = (True,)
    tau: float | None = None
    """The fixed temperature, or where one that is learned starts. None: the preset's."""
    tau_max: float | None = None
    """τ_max of the global losses. None: the preset's."""
    num_steps: int | None = None
    """None: the preset's."""
    table: str = ""
    """Temperatures of the training pairs, for the loss sogclr_given."""
    train: str = ""
    """Training pairs. Empty: the sample images."""
    train_captions: str = ""
    test: str = ""
    """Test images; also what the best model of a run is chosen by, if it is not the sample images."""
    test_captions: str = ""
    tokenizer: str = ""
    """Of the captions. Empty: that of the sample images."""
    flip_probability: float = 0.0
    """Horizontal flips; the captions of the sample images say left and right."""
    num_workers: int = 2
    """Of every run; the result does not depend on it."""
    num_threads: int = 0
    """Of every worker. 0: as `jobs.train_clip` chooses; 1 where several of these commands share a machine."""
    storage: str = "runs/claims"


def configuration(
    arguments: Arguments, loss: str, rho: float | None, noise: float, stop: bool, seed: int
) -> ClipConfig:
    """The run of one cell."""
    config = PRESETS[f"clip-cc3m-{loss.replace('_', '-')}-small"]()
    name = "-".join(
        part
        for part in (
            loss,
            f"rho{rho:g}" if rho is not None else "",
            f"noise{noise:g}" if noise else "",
            "" if stop else "no-stop-gradient",
            f"tau{arguments.tau:g}" if arguments.tau else "",
            f"taumax{arguments.tau_max:g}" if arguments.tau_max else "",
            f"seed{seed}",
        )
        if part
    )
    is_global = config.temperature.loss_config.kind.normaliser == "global"
    temperature = replace(
        config.temperature,
        rho=config.temperature.rho if rho is None else rho,
        stop_gradient=stop,
        tau=arguments.tau or config.temperature.tau,
        tau_max=arguments.tau_max if is_global else None,
        table=arguments.table if loss == "sogclr_given" else "",
    )
    data = replace(config.data, caption_noise=noise, flip_probability=arguments.flip_probability)
    if arguments.train:
        data = replace(
            data,
            train=arguments.train,
            train_captions=arguments.train_captions,
            validation=arguments.test,
            validation_captions=arguments.test_captions,
            tokenizer=arguments.tokenizer or data.tokenizer,
        )
    num_steps = arguments.num_steps or config.run.num_steps
    return replace(
        config,
        run=replace(
            config.run, name=name, storage=arguments.storage, seed=seed, num_steps=num_steps, checkpoint_every=num_steps
        ),
        data=data,
        temperature=temperature,
        workers=replace(config.workers, num_workers=arguments.num_workers, num_threads=arguments.num_threads),
        tracking=replace(config.tracking, enabled=False),
    )


@torch.no_grad()
def test_scores(config: ClipConfig, outcome: dict[str, Any], test: ImageManifest) -> dict[str, float]:
    """Recalls of the exported model."""
    held_out = RetrievalSet.read(pair_source(config, test), config)
    image, text = held_out.embeddings(
        DualEncoder.from_pretrained(outcome["export"]), World.alone(), torch.device("cpu")
    )
    return recall(image, text, torch.from_numpy(held_out.image_of_text))


def main(arguments: Arguments) -> None:
    """Run, or find, every cell, and print a row for every setting."""
    start_ray()
    test = prepare_images(
        PrepareImagesConfig(source=arguments.test or f"{SAMPLE_IMAGES}/test", captions=arguments.test_captions),
        f"{arguments.storage}/prepared",
    )
    lines = []
    for loss, rho, noise, stop in itertools.product(
        arguments.losses, arguments.rho or (None,), arguments.noise, arguments.stop_gradient
    ):
        recalls, means, deviations = [], [], []
        for seed in arguments.seeds:
            config = configuration(arguments, loss, rho, noise, stop, seed)
            outcome = train(make_plan(config))
            recalls.append(100 * test_scores(config, outcome, test)["mean_recall"])
            scores = outcome["validation"]
            means.append(scores.get("tau_mean", math.nan))
            deviations.append(scores.get("tau_std", math.nan))
        name = config.run.name.removesuffix(f"-seed{arguments.seeds[-1]}")
        lines.append(
            f"| {name} | {interval(recalls)} | {', '.join(f'{value:.1f}' for value in recalls)} "
            f"| {interval(means)} | {interval(deviations)} |"
        )
        print(f"\n{lines[-1]}\n", flush=True)
    print("\n| setting | mean recall, % | by seed | mean τ | standard deviation of τ |\n|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
