"""Presets of the contrastive experiments (TempNet Table 6, §6.2, Appendix D), and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, WorkersSection
from jobs.tasks.dual_encoder.config import (
    ClipConfig,
    DualEncoderSection,
    PairDataSection,
    PairTemperatureSection,
    RetrievalValidationSection,
)
from jobs.tasks.presets.twins import named, twins_of

Preset = Callable[[], ClipConfig]

SAMPLE_IMAGES = "data/sample/images"
SMALL_EXPORT = "runs/clip-cc3m-clip-small/export"
SMALL_TABLE = "runs/temperatures-small"

# Numbers of pairs in the two data sets, as given in the papers, and the batch size of all experiments.
_NUM_CC3M = 2_900_000
_NUM_CC12M = 12_000_000
_BATCH_SIZE = 512
_NUM_WARMUP_STEPS = 1000


def _cc3m(loss: str, paper: str, *, rho: float = 8.0, num_epochs: int = 30, num_pairs: int = _NUM_CC3M) -> ClipConfig:
    num_steps = num_epochs * num_pairs // _BATCH_SIZE
    return ClipConfig(
        run=RunSection(name=f"clip-cc3m-{loss}", num_steps=num_steps, checkpoint_every=2_000, log_every=50),
        data=PairDataSection(
            train="data/cc3m/train",
            validation="data/coco/val2014",
            validation_captions="data/coco/dataset_coco.json",
            validation_splits=("val",),
            num_readers=8,
        ),
        model=DualEncoderSection(image_path="microsoft/resnet-50", text_path="distilbert/distilbert-base-uncased"),
        temperature=PairTemperatureSection(loss=loss, rho=rho),
        optimizer=OptimizerSection(
            batch_size=_BATCH_SIZE,
            learning_rate_base=2e-4,
            learning_rate_tempnet=1e-5,
            weight_decay=0.02,
            beta2=0.999,
            warmup_share=_NUM_WARMUP_STEPS / num_steps,
            max_grad_norm=0.0,
        ),
        workers=WorkersSection(num_workers=4, use_gpu=True, zero_stage=1),
        validation=RetrievalValidationSection(every=num_pairs // _BATCH_SIZE),
        tracking=TrackingSection(experiment="contrastive", paper=paper),
    )


def clip_cc3m_clip() -> ClipConfig:
    """CLIP: one learned temperature, softmax over the batch (Table 3)."""
    return _cc3m("clip", "TempNet, Table 3")


def clip_cc3m_cyclip() -> ClipConfig:
    """CyCLIP: CLIP with the two cyclic terms (Table 3)."""
    return _cc3m("cyclip", "TempNet, Table 3")


def clip_cc3m_sogclr() -> ClipConfig:
    """SogCLR: the global contrastive loss, normalised over all data, at fixed τ = 0.01 (Table 3)."""
    return _cc3m("sogclr", "TempNet, Table 3")


def clip_cc3m_isogclr() -> ClipConfig:
    """iSogCLR: one learned temperature for every training image and caption (Table 3)."""
    return _cc3m("isogclr", "TempNet, Table 3")


def clip_cc3m_tempnet() -> ClipConfig:
    """TempNet: temperatures predicted from the embeddings, trained jointly with the encoder (Table 3)."""
    return _cc3m("tempnet", "TempNet, Table 3")


def clip_cc3m_temperature_free() -> ClipConfig:
    """No temperature: logits 2·artanh(cosine), softmax over the batch (arXiv 2501.17683)."""
    config = _cc3m("temperature_free", "arXiv 2501.17683")
    return replace(config, run=replace(config.run, name="clip-cc3m-temperature-free"))


def clip_cc3m_tempnet_in_batch() -> ClipConfig:
    """Ablation: TempNet's temperatures in a softmax over the batch (Table 18)."""
    config = _cc3m("tempnet_in_batch", "TempNet, Table 18")
    return replace(config, run=replace(config.run, name="clip-cc3m-tempnet-in-batch"))


def clip_cc12m_tempnet_frozen() -> ClipConfig:
    """Only the TempNets, trained for a frozen CLIP on CC12M, 10 epochs (§6.2, transfer)."""
    config = _cc3m("tempnet", "TempNet, §6.2", num_epochs=10, num_pairs=_NUM_CC12M)
    return replace(
        config,
        run=replace(config.run, name="clip-cc12m-tempnet-frozen"),
        data=replace(config.data, train="data/cc12m/train", num_text_tokens=77),
        model=DualEncoderSection(path="openai/clip-vit-base-patch32", freeze=True, embedding_size=512),
        optimizer=replace(config.optimizer, learning_rate_tempnet=1e-4),
    )


def clip_cc3m_sogclr_given() -> ClipConfig:
    """SogCLR at the temperatures that CC12M's TempNets predict for CC3M (Figure 5, right)."""
    config = _cc3m("sogclr", "TempNet, Figure 5, right")
    return replace(
        config,
        run=replace(config.run, name="clip-cc3m-sogclr-given"),
        temperature=replace(config.temperature, loss="sogclr_given", table="runs/temperatures-cc3m"),
    )


def _noise(percent: int) -> Preset:
    def preset() -> ClipConfig:
        config = _cc3m("tempnet", "TempNet, Figure 5, left")
        return replace(
            config,
            run=replace(config.run, name=f"clip-cc3m-noise-{percent:02d}"),
            data=replace(config.data, caption_noise=percent / 100),
        )

    preset.__doc__ = (
        f"TempNet with noise in {percent} % of the captions (Figure 5); rival: isogclr and data.caption_noise."
    )
    return preset


def small(config: ClipConfig) -> ClipConfig:
    """Return the twin of a configuration, which trains on the sample images in about two minutes on two CPU cores."""
    model, temperature = config.model, config.temperature
    if model.path:
        model = DualEncoderSection(
            path=SMALL_EXPORT, freeze=True, image_size=48, embedding_size=128, text_attention="eager"
        )
    else:
        model = DualEncoderSection(
            image_size=48,
            embedding_size=128,
            image_stem_width=24,
            image_widths=(24, 48, 96, 192),
            image_depths=(1, 1, 1, 1),
            image_block="basic",
            text_hidden_size=96,
            text_num_layers=2,
            text_num_heads=3,
            text_dropout=0.0,
            text_attention="eager",
        )
    # For a frozen base model there is an optimal mean τ, which ρ = 4.5 puts into the papers' band (measured: .0064).
    temperature = replace(temperature, rho=4.5 if model.freeze else 7.0, table=SMALL_TABLE if temperature.table else "")
    # A frozen base model does not change while its TempNets learn, so their learning rate can be high.
    optimizer = replace(config.optimizer, learning_rate_tempnet=1e-2 if model.freeze else 5e-4)
    if temperature.loss == "isogclr":
        temperature = replace(temperature, tau=0.02, tau_step=5e-4)
    if temperature.loss == "tempnet" and not model.freeze:
        # In joint training the mean τ falls as long as ρ is above the KL that the base model has reached, and it falls
        # faster than the temperatures learn to differ. So ρ is adjusted to that KL, which keeps the mean τ at
        # target_tau. The TempNets have a high learning rate, but start only after the base model has learned something.
        temperature = replace(temperature, rho=3.0, target_tau=0.02)
        optimizer = replace(optimizer, learning_rate_tempnet=3e-3, rest_share_tempnet=0.4)
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-small", num_steps=800, checkpoint_every=200, log_every=20),
        data=PairDataSection(
            train=f"{SAMPLE_IMAGES}/train",
            validation=f"{SAMPLE_IMAGES}/validation",
            tokenizer=f"{SAMPLE_IMAGES}/tokenizer",
            caption_noise=config.data.caption_noise,
            flip_probability=0.0,  # captions mention left and right
            min_crop_scale=0.8,
        ),
        model=model,
        temperature=temperature,
        optimizer=replace(optimizer, batch_size=128, learning_rate_base=1e-3, warmup_share=0.05),
        workers=WorkersSection(num_workers=2, cpus_per_worker=0.5, zero_stage=1),
        validation=RetrievalValidationSection(every=200),
    )


_FULL: dict[str, Preset] = {
    "clip-cc3m-clip": clip_cc3m_clip,
    "clip-cc3m-cyclip": clip_cc3m_cyclip,
    "clip-cc3m-sogclr": clip_cc3m_sogclr,
    "clip-cc3m-isogclr": clip_cc3m_isogclr,
    "clip-cc3m-tempnet": clip_cc3m_tempnet,
    "clip-cc3m-temperature-free": clip_cc3m_temperature_free,
    "clip-cc3m-tempnet-in-batch": clip_cc3m_tempnet_in_batch,
    "clip-cc12m-tempnet-frozen": clip_cc12m_tempnet_frozen,
    "clip-cc3m-sogclr-given": clip_cc3m_sogclr_given,
    **{f"clip-cc3m-noise-{percent:02d}": _noise(percent) for percent in (5, 10, 15)},
}

PRESETS: dict[str, Preset] = named(twins_of(_FULL, small, "sample images") | _FULL)
"""Preset name → function that returns its configuration."""
