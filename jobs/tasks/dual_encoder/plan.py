"""The plan of training a dual encoder: checks its configuration without Ray, prepares the pairs, and shows the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerFast

from jobs.engine.launch import tracking_uri
from jobs.engine.task import Plan, PreparedTask, data_sets
from jobs.tasks.base import (
    DataReference,
    count_parameters,
    create_task,
    describe_tau,
    feature_cache,
    loss_networks,
    naming_field,
    resolve_paths,
)
from jobs.tasks.config import check_sizes
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.task import (
    build_encoder,
    encoder_sizes,
    find_embeddings,
    pair_source,
    refer_to_towers,
)
from jobs.tasks.images import preparation, prepare_split
from pipelines.images.captions import CaptionEncoder
from pipelines.images.prepare import check_source
from pipelines.storage import exists
from pipelines.stream import READ_CPUS
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BASE_FILE

_TASKS = "jobs.tasks.dual_encoder.task"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPlan(Plan[ClipConfig]):
    """The plan of training a dual encoder and its temperatures."""

    unit = "pairs"
    curves: ClassVar = {
        "loss (training objective)": ("train/loss",),
        "cross-entropy (all pairs)": ("validation/cross_entropy_tau",),
        "recall": ("validation/mean_recall", "validation/text_recall@1", "validation/image_recall@1"),
        "τ": ("train/tau_q05", "train/tau_mean", "train/tau_q95"),
        "log u": ("train/log_u_mean",),
    }
    # The paper selects the run whose mean τ lies in this band (TempNet §6.2).
    band = (0.01, 0.02)

    num_image_parameters: int
    """Number of parameters of the image tower with its projection; 0 with stored embeddings."""
    num_text_parameters: int
    """Number of parameters of the text tower with its projection; 0 with stored embeddings."""
    num_tempnet_parameters: int
    """Number of parameters of the loss's networks together; 0 without networks."""

    @property
    def data_cpus(self) -> float:
        """Number of CPUs of the readers of all workers; one reads stored embeddings."""
        num_readers = 1 if self.config.model.features else self.config.data.num_readers
        return READ_CPUS * num_readers * self.config.workers.max_workers

    def describe(self) -> str:
        config, loss = self.config, self.config.temperature.loss_config
        size, workers = config.optimizer.batch_size, config.workers.max_workers
        gamma = f"from 1 to {loss.gamma_min:g}" if loss.has_falling_gamma else f"constant {loss.gamma:g}"
        num_base_parameters = self.num_image_parameters + self.num_text_parameters
        num_frozen = num_base_parameters if config.model.freeze else 0
        towers = f"image tower {self.num_image_parameters:,}, text tower {self.num_text_parameters:,}"
        towers += " (frozen)" if config.model.freeze else ""
        if config.model.features:
            towers = "towers none (frozen, their embeddings are read)"
        return self.describe_lines(
            about={
                "loss": f"{loss.name}: temperature {loss.kind.temperature}, normaliser {loss.kind.normaliser}, "
                f"τ in [{loss.tau_min:g}, {loss.tau_max:g}]"
                + (f", ρ = {loss.rho:g}" if loss.kind.uses_rho else "")
                + (f", γ {gamma}" if loss.kind.objective == "robust" else ""),
                "batch": f"{size} pairs: {workers} workers × {size // workers}, each image against {size - 1} captions",
            },
            num_units=size,
            readers="" if config.model.features else f"; {config.data.num_readers} readers each",
            parameters=f"{towers}, networks of the loss {self.num_tempnet_parameters:,}",
            num_trained=num_base_parameters + self.num_tempnet_parameters - num_frozen,
            num_frozen=num_frozen,
            notes=_notes(config),
        )

    def prepare(self) -> PreparedTask:
        """Index the images, unless this was done before, and read the table of temperatures if one is given."""
        config = resolve_paths(self.config)
        train, validation = prepare_split(config, "train"), prepare_split(config, "validation")
        size, splits = config.optimizer.batch_size, {"train": train, "validation": validation}
        check_sizes(config, config.temperature, num_samples=train.num_pairs, num_pairs_per_batch=size, noun="pairs")
        towers = refer_to_towers(config) if config.model.freeze else None
        embeddings = None
        if towers is not None and config.model.features:
            stored = [find_embeddings(config, data, towers, split) for split, data in splits.items()]
            feature_cache(config, train, [stored[0].images, stored[0].captions], split="train")
            embeddings = stored[0].directory, stored[1].directory
        given_tau = None
        if config.temperature.table:
            from pipelines.images.temperature_table import read_temperatures

            with naming_field("temperature.table: "):
                given_tau = read_temperatures(config.temperature.table, train)
        data = DataReference(
            train=train.directory,
            validation=validation.directory,
            given_tau=given_tau,
            base=towers,
            features=embeddings,
        )
        loss = config.temperature.loss_config
        share_cut = {name: pair_source(config, pairs).share_of_captions_cut() for name, pairs in splits.items()}
        return PreparedTask(
            create_task=partial(create_task, f"{_TASKS}:ClipTask", config, data),
            config=config,
            num_samples=train.num_pairs,
            parameters={
                "num_pairs": train.num_pairs,
                "num_images": train.num_images,
                **{f"share_cut_{name}": share for name, share in share_cut.items()},
            },
            data_sets=data_sets(self.config.data, train, validation),
            outcome={
                "loss": loss.name,
                "rho": loss.rho if loss.kind.uses_rho else None,
                "tau_min": loss.tau_min,
                "tau_max": loss.tau_max,
                "num_samples_lost": {name: dict(pairs.problems) for name, pairs in splits.items()},
                "share_cut": share_cut,
                "num_text_tokens": config.data.num_text_tokens,
                "num_pairs_train": train.num_pairs,
            },
            records={BASE_FILE: asdict(towers)} if towers is not None else {},
        )

    def rows(self, outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
        scores = outcome["validation"]
        rho = scores.get("rho", outcome["rho"])  # temperature.target_tau moves it
        rows = [
            ("loss", outcome["loss"] + (f", ρ = {rho:.4g}" if rho is not None else "")),
            ("cross-entropy at τ, all held-out pairs", f"{scores['cross_entropy_tau']:.4f}"),
            ("mean recall, last", f"{scores['mean_recall']:.2%}"),
        ]
        if outcome["best_rating"] is not None:
            rows.append(("mean recall, best (exported)", f"{outcome['best_rating']:.2%}"))
        for direction, name in (("image → text", "text"), ("text → image", "image")):
            figures = " / ".join(f"{scores[f'{name}_recall@{k}']:.2%}" for k in (1, 5, 10))
            rows.append((f"R@1 / 5 / 10, {direction}", figures))
        for name, text in describe_tau(scores):
            low, high = self.band
            where = "in" if low <= scores["tau_mean"] <= high else "outside"
            rows.append((name, f"{text} ({where} the papers' band {low:g} to {high:g})"))
        for name, noun in (("image", "images"), ("text", "captions")):
            if f"{name}_tau_mean" in scores:
                rows.append((f"  of {noun}", f"{scores[f'{name}_tau_mean']:.4f} ± {scores[f'{name}_tau_std']:.4f}"))
        shares = ", ".join(f"{share:.2%} ({split})" for split, share in outcome["share_cut"].items())
        rows.append((f"captions cut to {outcome['num_text_tokens']} tokens", shares))
        return rows


def _notes(config: ClipConfig) -> list[str]:
    """Return warnings about a configuration that is legal but may not work well."""
    loss, num_negatives = config.temperature.loss_config, config.optimizer.batch_size - 1
    limit = math.log(max(1, num_negatives))
    if not loss.kind.uses_rho or loss.rho < limit:
        return []
    # Such a ρ is feasible, because the moving averages stand for contrasts with all pairs. But after few epochs the
    # averages cover little more than a batch.
    return [
        f"ρ = {loss.rho:g} is not below log({num_negatives} negatives of a batch) = "
        f"{limit:.2f}: temperatures tend to their lower bound unless the averages see many batches"
    ]


def make_plan(config: ClipConfig) -> ClipPlan:
    """Make the plan of a run, checking everything that can be checked without Ray."""
    uri = tracking_uri(config)
    for split in ("train", "validation"):
        with naming_field(f"data.{split}: "):
            check_source(preparation(config, split))
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    with naming_field("data."):
        CaptionEncoder(tokenizer=tokenizer, num_text_tokens=config.data.num_text_tokens)
    if config.temperature.table and not exists(config.temperature.table):
        raise FileNotFoundError(f"temperature.table = {config.temperature.table!r} does not exist")
    num_parameters = (0, 0)
    if config.model.features:
        encoder_sizes(config)  # which checks them
    else:
        num_parameters = _check_towers(config, tokenizer)
    networks = loss_networks(config.temperature, config.model.embedding_size, "image", "text")
    return ClipPlan(
        config=config,
        num_image_parameters=num_parameters[0],
        num_text_parameters=num_parameters[1],
        num_tempnet_parameters=count_parameters(*networks.values()),
        tracking_uri=uri,
    )


def _check_towers(config: ClipConfig, tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Build the towers, check that they can be trained as configured, and return their numbers of parameters."""
    encoder = build_encoder(config, tokenizer)
    if config.workers.activation_checkpointing and any(
        isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in encoder.modules()
    ):
        raise ValueError(
            "workers.activation_checkpointing = True would run the batch norms of the image tower twice, and move their "
            "statistics twice: choose False, or an image tower without batch norm"
        )
    return (
        count_parameters(encoder.image_encoder, encoder.image_projection),
        count_parameters(encoder.text_encoder, encoder.text_projection),
    )
