"""Presets of the contrastive experiments (TempNet Table 6, §6.2, Appendix D), and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, WorkersSection
from jobs.engine.fields import with_fields
from jobs.tasks.dual_encoder.config import (
    ClipConfig,
    DualEncoderSection,
    PairDataSection,
    PairTemperatureSection,
)
from jobs.tasks.presets import TWO_WORKERS, named, twins_of, variant

Preset = Callable[[], ClipConfig]

SAMPLE_IMAGES = "data/sample/images"
SMALL_EXPORT = "runs/clip-cc3m-clip-small/export"
SMALL_TABLE = "runs/temperatures-small"

# Numbers of pairs in the two data sets, as given in the papers, and the batch size of all experiments.
_NUM_CC3M = 2_900_000
_NUM_CC12M = 12_000_000
_BATCH_SIZE = 512


def _duration(num_epochs: int, num_pairs: int) -> dict[str, Any]:
    """Return the fields that follow from the number of epochs: 1 000 steps of warm-up, and validation every epoch."""
    num_steps = num_epochs * num_pairs // _BATCH_SIZE
    return {
        "run.num_steps": num_steps,
        "optimizer.warmup_share": 1000 / num_steps,
        "validation.every": num_pairs // _BATCH_SIZE,
    }


def clip_cc3m_tempnet() -> ClipConfig:
    """TempNet: temperatures predicted from the embeddings, trained jointly with the encoder (Table 3)."""
    config = ClipConfig(
        run=RunSection(name="clip-cc3m-tempnet", checkpoint_every=2_000, log_every=50),
        data=PairDataSection(
            train="data/cc3m/train",
            validation="data/coco/val2014",
            validation_captions="data/coco/dataset_coco.json",
            validation_splits=("val",),
            num_readers=8,
        ),
        model=DualEncoderSection(image_path="microsoft/resnet-50", text_path="distilbert/distilbert-base-uncased"),
        temperature=PairTemperatureSection(loss="tempnet", rho=8.0),
        optimizer=OptimizerSection(
            batch_size=_BATCH_SIZE,
            learning_rate_base=2e-4,
            learning_rate_tempnet=1e-5,
            weight_decay=0.02,
            beta2=0.999,
            max_grad_norm=0.0,
        ),
        workers=WorkersSection(num_workers=4, use_gpu=True, zero_stage=1),
        tracking=TrackingSection(experiment="contrastive", paper="TempNet, Table 3"),
    )
    return with_fields(config, _duration(30, _NUM_CC3M))


def _cc3m(doc: str, loss: str, paper: str, **data: Any) -> Preset:
    changes = {f"data.{name}": value for name, value in data.items()} | _CHANGES.get(loss, {})
    table = "runs/temperatures-cc3m" if loss == "sogclr_given" else ""
    changes |= {"temperature.loss": loss, "temperature.table": table, "tracking.paper": paper}
    return variant(clip_cc3m_tempnet, doc, changes)


_CHANGES: dict[str, dict[str, Any]] = {
    "fastclip_v2": {"temperature.rho": 7.0},
    "fastclip_v3": {"temperature.rho": 6.5},
    "neuclip": {"temperature.rho": 6.5, "temperature.gamma_min": 0.0},
    "tempnet_neuclip": {"temperature.gamma_min": 0.0},
}
"""Name of a loss → fields that differ (ρ of FastCLIP on CC3M: its code)."""
_LOSSES = {
    "clip": ("TempNet, Table 3", "CLIP: one learned temperature, softmax over the batch (Table 3)."),
    "cyclip": ("TempNet, Table 3", "CyCLIP: CLIP with the two cyclic terms (Table 3)."),
    "sogclr": (
        "TempNet, Table 3",
        "SogCLR: the global contrastive loss, normalised over all data, at fixed τ = 0.01 (Table 3).",
    ),
    "isogclr": ("TempNet, Table 3", "iSogCLR: one learned temperature for every training image and caption (Table 3)."),
    "tempnet": ("TempNet, Table 3", (clip_cc3m_tempnet.__doc__ or "")),
    "temperature_free": (
        "arXiv 2501.17683",
        "No temperature: logits 2·artanh(cosine), softmax over the batch (arXiv 2501.17683).",
    ),
    "tempnet_in_batch": (
        "TempNet, Table 18",
        "Ablation: TempNet's temperatures in a softmax over the batch (Table 18).",
    ),
    "fastclip_v0": (
        "arXiv 2407.01445",
        "FastCLIP v0: log of the global normaliser, one learned temperature, falling γ.",
    ),
    "fastclip_v1": ("arXiv 2407.01445", "FastCLIP v1: SogCLR with falling γ."),
    "fastclip_v2": ("arXiv 2407.01445", "FastCLIP v2: iSogCLR with falling γ."),
    "fastclip_v3": ("arXiv 2407.01445", "FastCLIP v3: the robust global loss, one learned temperature, falling γ."),
    "siglip": ("arXiv 2303.15343", "SigLIP: a sigmoid for every pair, one learned temperature and bias."),
    "neuclip": (
        "arXiv 2511.08417",
        "NeuCLIP: FastCLIP v3 with normalisers predicted by networks instead of stored per sample.",
    ),
    "tempnet_neuclip": (
        "arXiv 2404.04575 and 2511.08417",
        "TempNet with normalisers predicted by networks beside it: nothing is stored per sample.",
    ),
}
"""Name of a loss → its table in a paper, and its line of `--help`."""
_FULL: dict[str, Preset] = {
    **{f"clip-cc3m-{loss.replace('_', '-')}": _cc3m(doc, loss, paper) for loss, (paper, doc) in _LOSSES.items()},
    "clip-cc12m-tempnet-frozen": variant(
        clip_cc3m_tempnet,
        "Only the TempNets, trained for a frozen CLIP on CC12M, 10 epochs (§6.2, transfer).",
        {
            **_duration(10, _NUM_CC12M),
            "data.train": "data/cc12m/train",
            "data.num_text_tokens": 77,
            "model.path": "openai/clip-vit-base-patch32",
            "model.image_path": "",
            "model.text_path": "",
            "model.freeze": True,
            "model.embedding_size": 512,
            "optimizer.learning_rate_tempnet": 1e-4,
            "tracking.paper": "TempNet, §6.2",
        },
    ),
    "clip-cc3m-sogclr-given": _cc3m(
        "SogCLR at the temperatures that CC12M's TempNets predict for CC3M (Figure 5, right).",
        "sogclr_given",
        "TempNet, Figure 5, right",
    ),
    **{
        f"clip-cc3m-noise-{percent:02d}": _cc3m(
            f"TempNet with noise in {percent} % of the captions (Figure 5); rival: isogclr and data.caption_noise.",
            "tempnet",
            "TempNet, Figure 5, left",
            caption_noise=percent / 100,
        )
        for percent in (5, 10, 15)
    },
}


def small(config: ClipConfig) -> ClipConfig:
    """Return the twin of a configuration, which trains on the sample images in about two minutes on two CPU cores."""
    is_frozen = config.model.freeze
    changes = {
        "run.num_steps": 800,
        "run.checkpoint_every": 200,
        "run.log_every": 20,
        "data.train": f"{SAMPLE_IMAGES}/train",
        "data.validation": f"{SAMPLE_IMAGES}/validation",
        "data.validation_captions": "",
        "data.validation_splits": (),
        "data.tokenizer": f"{SAMPLE_IMAGES}/tokenizer",
        "data.num_text_tokens": 30,
        "data.num_readers": 1,
        "data.flip_probability": 0.0,  # captions mention left and right
        "data.min_crop_scale": 0.8,
        "model.image_path": "",
        "model.text_path": "",
        "model.image_size": 48,
        "model.embedding_size": 128,
        "model.text_attention": "eager",
        # For a frozen base model there is an optimal mean τ, which ρ = 4.5 puts near the papers' band (measured: .0064).
        "temperature.rho": 4.5 if is_frozen else 7.0,
        "temperature.table": SMALL_TABLE if config.temperature.table else "",
        "optimizer.batch_size": 128,
        "optimizer.learning_rate_base": 1e-3,
        # A frozen base model does not change while its TempNets learn, so their learning rate can be high.
        "optimizer.learning_rate_tempnet": 1e-2 if is_frozen else 5e-4,
        "optimizer.warmup_share": 0.05,
        **TWO_WORKERS,
        "validation.every": 200,
    }
    changes |= {"model.path": SMALL_EXPORT} if is_frozen else _SMALL_TOWERS
    if config.temperature.loss in ("isogclr", "fastclip_v2"):
        changes |= {"temperature.tau": 0.02, "temperature.tau_step": 5e-4}
    if config.temperature.loss in ("fastclip_v3", "neuclip"):  # τ is one number, which a larger ρ sends to its floor.
        changes |= {"temperature.rho": 3.0}
    if config.temperature.loss in ("tempnet", "tempnet_neuclip") and not is_frozen:
        # In joint training the mean τ falls as long as ρ is above the KL that the base model has reached, and it falls
        # faster than the temperatures learn to differ. So ρ is adjusted to that KL, which keeps the mean τ at
        # target_tau. The TempNets have a high learning rate, but start only after the base model has learned something.
        changes |= {"temperature.rho": 3.0, "temperature.target_tau": 0.02}
        changes |= {"optimizer.learning_rate_tempnet": 3e-3, "optimizer.rest_share_tempnet": 0.4}
    return with_fields(config, changes)


_SMALL_TOWERS = {
    "model.image_stem_width": 24,
    "model.image_widths": (24, 48, 96, 192),
    "model.image_depths": (1, 1, 1, 1),
    "model.image_block": "basic",
    "model.text_hidden_size": 96,
    "model.text_num_layers": 2,
    "model.text_num_heads": 3,
    "model.text_dropout": 0.0,
}

PRESETS: dict[str, Preset] = named(twins_of(_FULL, small, "sample images") | _FULL)
"""Preset name → function that returns its configuration."""
