"""The task of training a dual encoder and its temperatures, as the loop runs it on a worker, alone or with others.

Its data, images and captions or the stored embeddings of frozen towers, and its module are here, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.export import open_export
from jobs.engine.hardware import worker_device
from jobs.engine.task import ParameterGroup, RhoSteering, StepResult, Task
from jobs.tasks.base import (
    DataReference,
    autocast_dtype,
    base_and_tempnet_groups,
    check_continues,
    check_vocabulary,
    draw_samples,
    feature_cache,
    load_stored,
    loss_networks,
    loss_state,
    num_stored_readers,
    order_of,
    to_device,
)
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.validation import MAX_PAIRS_COMPARED, HeldOut, encode_held_out, rivals, score
from jobs.tasks.images import build_image_tower, cache_for
from pipelines.features import EmbeddingSource, PairEmbeddings, features_directory
from pipelines.images import views
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.local_copy import checked_copy
from pipelines.stream import Batch
from pipelines.text.tokenization import load_tokenizer, tokenizer_digest
from tempnet.base_model import BaseReference
from tempnet.contrastive.config import gamma_at
from tempnet.contrastive.losses import ContrastiveLoss, PairStatistics
from tempnet.contrastive.state import SampleState, World
from tempnet.models.dual_encoder import (
    IMAGE_TEMPNET_DIRECTORY,
    TEXT_TEMPNET_DIRECTORY,
    DualEncoder,
    SideBySideDualEncoder,
    TemperatureDualEncoder,
    encoder_digest,
    read_sizes,
    save_training_temperature,
)
from tempnet.models.dual_encoder_config import DualEncoderConfig
from tempnet.models.towers import load_tower, random_tower

if TYPE_CHECKING:  # the driver, which builds the model to check it, does not need DeepSpeed
    from deepspeed import DeepSpeedEngine

_FIELDS = ("images", "input_ids", "attention_mask", "image_embeddings", "text_embeddings", "ids", "image_ids")


class ClipTask(Task[ClipConfig]):
    """The task of training a dual encoder and its temperatures; the methods are described in `jobs.engine.task.Task`."""

    unit = "pairs"
    module: Any
    """A `TemperatureDualEncoder`, or the `SideBySideDualEncoder` of several runs, whose parts the members have."""
    steering: RhoSteering

    def __init__(self, config: ClipConfig, data: DataReference, rank: int, world_size: int) -> None:
        self.data, self.base = data, data.base
        self.train, self.held_out_pairs = ImageManifest.load(data.train), ImageManifest.load(data.validation)
        self.source: PairSource | EmbeddingSource
        reading = order_of(config, self.train)
        if data.features is None:
            self.source = pair_source(config, self.train)
            reading |= config.data.reading
        else:
            embeddings = PairEmbeddings.load(data.features[0], self.train)
            size = feature_cache(config, self.train, [embeddings.images, embeddings.captions])
            self.source = EmbeddingSource(embeddings=embeddings, cache_bytes=size)
            reading["num_readers"] = num_stored_readers(embeddings.directory)
        super().__init__(config, self.source, rank=rank, world_size=world_size, **reading)
        self._shared: dict[str, Any] = {}
        """What any member has found for all: the embeddings of the validation set, and towers to export."""

    def build(self, *, is_fresh: bool) -> None:
        """Build the module with its per-sample state and prototypes, and read the validation set's stored embeddings."""
        towers = None
        if self.data.features is None:
            towers = build_encoder(self.config, load_tokenizer(self.config.tokenizer, needs_eos=False))
        else:
            total = self.held_out_pairs.num_images
            stored = PairEmbeddings.load(self.data.features[1], self.held_out_pairs)
            *vectors, owner = stored.read_held_out(min(self.config.validation.num_images or total, total))
            image, text = map(torch.from_numpy, vectors)
            self._shared["held_out"] = HeldOut(image=image, text=text, image_of_text=owner)
        for member in self.make_members():
            member._build_on(towers, is_fresh=is_fresh)
        if len(self.members) > 1:
            self.module = SideBySideDualEncoder([member.module for member in self.members])

    def _build_on(self, towers: DualEncoder | None, *, is_fresh: bool) -> None:
        """Build the module of this run on its towers."""
        device = worker_device(self.config.workers)
        self.module = add_loss(towers, self.config, num_pairs=self.train.num_pairs, device=device)
        if is_fresh:
            self._init_prototypes(device)
        settings = self.config.temperature
        self.steering = RhoSteering(
            target=settings.target_tau,
            gain=settings.rho_gain,
            rho=self.module.loss.config.rho,
            limit=math.log(max(2, self.train.num_pairs - 1)),
            tau_range=settings.tau_range,
            apply=self._set_rho,
        )
        if self.data.given_tau is not None:
            self.module.loss.state.fill("tau", torch.from_numpy(self.data.given_tau))

    def _set_rho(self, rho: float) -> None:
        self.module.loss.config = replace(self.module.loss.config, rho=rho)

    @torch.no_grad()
    def _init_prototypes(self, device: torch.device) -> None:
        """Initialise the networks' prototypes from embeddings of random training images and texts, the same on every rank."""
        module, settings = self.module, self.config.temperature
        if not settings.needs_prototypes:
            return
        ids = draw_samples(self.train.num_pairs, settings.num_prototypes, self.config.run.seed)
        tensors = tensors_of(self.source.read(*self.source.locate(ids), 0), device)
        module.eval()
        module.init_prototypes(*module.embed(**inputs_of(tensors)))
        module.train()

    @property
    def sample_state(self) -> SampleState | None:
        return self.module.loss.state

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: towers, projections and the learned scalars, if any; and the TempNets.

        Networks that predict normalisers have to follow the towers, so that they learn at the towers' rate; beside frozen
        towers they belong to the TempNets.
        """
        loss = self.module.loss
        base: list[nn.Module | None] = [self.module.encoder, loss.learned]
        tempnets: list[nn.Module | None] = [loss.image_tempnet, loss.text_tempnet]
        (tempnets if self.config.model.freeze else base).extend([loss.image_normaliser, loss.text_normaliser])
        return base_and_tempnet_groups(base, tempnets, self.config.optimizer)

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        configs = [member.config.temperature.loss_config for member in self.members]
        gammas = [gamma_at(config, step, self.config.run.num_steps) for config in configs]
        are_steered = [member.steering.follows(engine.optimizer, member.number) for member in self.members]
        tensors = tensors_of(batch, engine.device)
        outputs = engine(**tensors, gammas=gammas) if len(gammas) > 1 else [engine(**tensors, gamma=gammas[0])]
        losses = [output["loss"] for output in outputs]
        engine.backward(sum(losses[1:], losses[0]))
        engine.step()
        for member, is_steered, output in zip(self.members, are_steered, outputs, strict=True):
            if is_steered:
                member.steering.observe(output["tau"].flatten(), output["dual_gradient"].flatten())
        statistics: Any = None
        if with_statistics:
            statistics = [PairStatistics.of(output, config) for output, config in zip(outputs, configs, strict=True)]
        return StepResult(torch.stack(losses).detach().squeeze() / self.world_size, statistics)

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return recalls and cross-entropy; the details are histograms of τ and a comparison with constant temperatures."""
        held_out = self.held_out(self.module, engine.device)
        scores, details = score(self.module, held_out, engine.device, with_details=with_details)
        if details is not None and self.module.loss.config.kind.temperature == "per_sample":
            details |= self._judge_stored_temperatures(engine.device)
        return scores | self.steering.scores(), details

    def _judge_stored_temperatures(self, device: torch.device) -> dict[str, Any]:
        """Compare the temperatures of training pairs, which are of no others, with constants. All ranks must call this."""
        number = min(self.train.num_pairs, MAX_PAIRS_COMPARED)
        ids = draw_samples(self.train.num_pairs, number, self.config.run.seed)
        parts = []
        for at in range(0, number, self.config.validation.batch_size):
            chosen = ids[at : at + self.config.validation.batch_size]
            tensors = tensors_of(self.source.read(*self.source.locate(chosen), 0), device)
            parts.append((*self.module.embed(**inputs_of(tensors)), tensors["ids"], tensors["image_ids"]))
        image, text, kept, owner = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = self.module.loss
        assert loss.state is not None
        tau = loss.state.read(kept)["tau"]
        if self.rank != 0:
            return {}
        figures = rivals(image.cpu(), text.cpu(), owner.cpu(), tau.cpu(), loss.config)
        return {"rivals": figures, "judged_by": loss.config.kind.objective, "judged_on": "training"}

    def held_out(self, module: TemperatureDualEncoder, device: torch.device) -> HeldOut:
        """Return the embeddings of the validation set; those of frozen towers are computed once."""
        held_out: HeldOut | None = self._shared.get("held_out")
        if held_out is not None:
            return held_out
        assert module.encoder is not None
        source = pair_source(self.config, self.held_out_pairs)
        held_out = encode_held_out(source, self.config, module.encoder, module.loss.world, device)
        if self.config.model.freeze:
            self._shared["held_out"] = held_out
        return held_out

    def describe(self, scores: Mapping[str, float]) -> str:
        tau = f"; mean τ {scores['tau_mean']:.4f}" if "tau_mean" in scores else ""
        return (
            f"cross-entropy {scores['cross_entropy_tau']:.4f}; "
            f"mean recall {scores['mean_recall']:.2%} (R@1 image → text {scores['text_recall@1']:.2%}, "
            f"text → image {scores['image_recall@1']:.2%}){tau}"
        )

    def rating(self, scores: Mapping[str, float]) -> float | None:
        """Return the mean recall; None with a frozen encoder, so that the last model is exported (recall is constant)."""
        return None if self.config.model.freeze else scores["mean_recall"]

    def export(self) -> None:
        """Write dual encoder, tokenizer and TempNets; towers whose embeddings were stored are loaded for this."""
        if self.rank == 0:
            tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
            towers = self.module.encoder or self._shared.get("towers") or build_encoder(self.config, tokenizer)
            self._shared["towers"] = towers
            export_encoder(towers, self.module.loss, tokenizer, self.config.run.export_directory)


def export_encoder(encoder: DualEncoder, loss: ContrastiveLoss, tokenizer: PreTrainedTokenizerFast, uri: str) -> None:
    """Write dual encoder, tokenizer and the loss's TempNets or constant τ into `uri`, overwriting an earlier export.

    The towers load with Transformers alone.
    """
    with open_export(uri) as directory:
        encoder.save_pretrained(directory, tokenizer)
        if (tau := loss.constant_tau) is not None:
            save_training_temperature(directory, tau)
        if loss.image_tempnet is not None and loss.text_tempnet is not None:
            loss.image_tempnet.save_pretrained(directory / IMAGE_TEMPNET_DIRECTORY)
            loss.text_tempnet.save_pretrained(directory / TEXT_TEMPNET_DIRECTORY)


def tensors_of(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a batch that the module reads as tensors."""
    return {name: to_device(batch[name], device) for name in _FIELDS if name in batch}


def inputs_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the tensors of a batch that become embeddings, or are (`TemperatureDualEncoder.embed`)."""
    return {name: value for name, value in tensors.items() if name not in ("ids", "image_ids")}


# ---- data and module -------------------------------------------------------------------------------------------------


def pair_source(config: ClipConfig, manifest: ImageManifest) -> PairSource:
    """Return the source that reads views of images, and tokens, from prepared data."""
    return PairSource(
        manifest=manifest,
        tokenizer=load_tokenizer(config.tokenizer, needs_eos=False),
        image_size=config.model.image_size,
        num_text_tokens=config.data.num_text_tokens,
        seed=config.run.seed,
        augmentation=config.data.augmentation,
        caption_noise=config.data.caption_noise,
        cache_bytes=cache_for(config, manifest),
    )


def refer_to_towers(config: ClipConfig) -> BaseReference:
    path = config.model.path
    found = BaseReference(path=path, digest=encoder_digest(checked_copy(path, "model.path = ")))
    return check_continues(config, path, found)


def caption_noise(config: ClipConfig, split: str) -> float:
    """Return the share of the captions of train or validation that have noise: validation has none."""
    return config.data.caption_noise if split == "train" else 0.0


def embeddings_of(config: ClipConfig, pairs: ImageManifest, towers: BaseReference, split: str) -> PairEmbeddings:
    """Return where the towers' embeddings of the pairs of train or validation are, or will be, in the run's precision."""
    noise = caption_noise(config, split)
    directory = features_directory(
        config.run.prepared_directory,
        pairs,
        kind="pairs",
        views=views.VERSION,
        encoder=towers.digest,
        precision=config.workers.resolved_precision,
        tokenizer=tokenizer_digest(load_tokenizer(config.tokenizer, needs_eos=False)),
        num_text_tokens=config.data.num_text_tokens,
        **({"caption_noise": [noise, config.run.seed]} if noise else {}),
    )
    sizes = encoder_sizes(config)
    return PairEmbeddings(
        directory=directory,
        pairs=pairs,
        embedding_size=sizes.embedding_size,
        image_size=sizes.image_size,
        num_text_tokens=sizes.num_text_tokens,
    )


def find_embeddings(config: ClipConfig, pairs: ImageManifest, towers: BaseReference, split: str) -> PairEmbeddings:
    """Return the stored embeddings of the pairs of train or validation."""
    what = f"the embeddings of data.{split} for these towers, captions and precision are not stored"
    return load_stored(embeddings_of(config, pairs, towers, split), pairs, what=what, job="jobs.train_clip")


def build_encoder(config: ClipConfig, tokenizer: PreTrainedTokenizerFast) -> DualEncoder:
    """Build the dual encoder, the same on every rank: loaded as a whole, or from pretrained or random towers."""
    settings = config.model
    torch.manual_seed(config.run.seed)
    if settings.path:
        encoder_sizes(config)
        place = checked_copy(settings.path, "model.path = ")
        encoder = DualEncoder.from_pretrained(place, autocast_dtype=autocast_dtype(config))
    else:
        sizes = DualEncoderConfig(
            embedding_size=settings.embedding_size,
            image_size=settings.image_size,
            num_text_tokens=config.data.num_text_tokens,
        )
        image_tower = build_image_tower(settings, settings.image_path, "model.image_path")
        text_tower = _text_tower(config, tokenizer)
        encoder = DualEncoder(image_tower, text_tower, sizes, autocast_dtype=autocast_dtype(config))
    encoder.text_encoder.set_attn_implementation(settings.text_attention)
    check_vocabulary(encoder.text_encoder, tokenizer, config.tokenizer, what="text encoder")
    return encoder


def encoder_sizes(config: ClipConfig) -> DualEncoderConfig:
    """Return the sizes of the dual encoder at `model.path`, without loading its weights."""
    settings = config.model
    sizes = read_sizes(checked_copy(settings.path, "model.path = "))
    for field, wanted, found in (
        ("model.image_size", settings.image_size, sizes.image_size),
        ("model.embedding_size", settings.embedding_size, sizes.embedding_size),
        ("data.num_text_tokens", config.data.num_text_tokens, sizes.num_text_tokens),
    ):
        if wanted != found:
            raise ValueError(f"{field} = {wanted}, but model.path = {settings.path!r} was made for {found}")
    return sizes


def _text_tower(config: ClipConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    settings = config.model
    if settings.text_path:
        return load_tower(checked_copy(settings.text_path, "model.text_path = "), "text")
    return random_tower(
        "distilbert",
        "text",
        vocab_size=len(tokenizer),
        dim=settings.text_hidden_size,
        hidden_dim=4 * settings.text_hidden_size,
        n_layers=settings.text_num_layers,
        n_heads=settings.text_num_heads,
        max_position_embeddings=max(512, config.data.num_text_tokens),
        dropout=settings.text_dropout,
        attention_dropout=settings.text_dropout,
        pad_token_id=tokenizer.pad_token_id or 0,
    )


def add_loss(
    encoder: DualEncoder | None, config: ClipConfig, *, num_pairs: int, device: torch.device
) -> TemperatureDualEncoder:
    """Build the module: add the loss, with its networks and the state of `num_pairs` samples, to the encoder; None: its
    embeddings are stored.
    """
    if config.model.freeze:  # whether the towers were built, which draws random numbers, must not matter
        torch.manual_seed(config.run.seed)
    temperature, world = config.temperature, World.current()
    networks = loss_networks(temperature, config.model.embedding_size, "image", "text")
    state = loss_state(temperature, num_samples=num_pairs, world=world, device=device)
    loss = ContrastiveLoss(temperature.loss_config, **networks, state=state, world=world)
    return TemperatureDualEncoder(encoder, loss, freeze_encoder=config.model.freeze).to(device)
