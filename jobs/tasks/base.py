"""What several kinds of training share beside `jobs.engine.task`: their data, frozen bases, memory and parameter groups."""

from __future__ import annotations

import dataclasses
import importlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.config import EncoderSection, OptimizerSection, TrainingConfig
from jobs.engine.fields import resolve_fields, with_absolute_paths
from jobs.engine.hardware import GIB
from jobs.engine.task import ParameterGroup, Statistics, StepResult, Task, trainable
from jobs.tasks.config import ContrastiveSection, ReadSection, UnimodalSection
from pipelines.block_cache import DIRECTORY_VARIABLE
from pipelines.local_copy import checked_copy
from pipelines.object_store import is_local
from pipelines.plan import StreamPlan
from pipelines.storage import read_json, resolve
from pipelines.stream import Batch
from tempnet.base_model import BASE_FILE, BaseReference
from tempnet.contrastive.config import gamma_at
from tempnet.contrastive.normalisers import NormaliserNet
from tempnet.contrastive.state import SampleState, World
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.weights import check_weight_files, load_fitting

if TYPE_CHECKING:  # the driver does not need DeepSpeed, and only some tasks read stored features
    from deepspeed import DeepSpeedEngine

    from pipelines.features import FeatureFiles

Config = TypeVar("Config", bound=TrainingConfig)
Stored = TypeVar("Stored", bound=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReference:
    """What a worker needs to find the data of its task; manifests themselves may be too large to be sent."""

    train: Any
    """Directory of the prepared training data, or what is known of text that is still being prepared."""
    validation: Any
    """Directory of the prepared validation data."""
    base: BaseReference | None = None
    """The frozen base; None if the base is trained."""
    features: tuple[str, str] | None = None
    """Directories of what the frozen base has computed for both data sets; None: the base computes it."""
    memory: Mapping[int, float] = field(default_factory=dict)
    """Micro-batch size → bytes of a worker, from which workers choose by their free memory; empty: the size is given."""
    given_tau: np.ndarray | None = None
    """(2, N) temperatures, float32, of the images and texts of the N training pairs for the loss `sogclr_given`."""


def create_task(task: str, config: TrainingConfig, *rest: Any) -> Task:
    """Create a task on a worker; `task` is MODULE:CLASS, and `rest` ends with the rank and the number of workers.

    The module is imported only here, as it loads DeepSpeed, which the driver does not need.
    """
    module, _, name = task.partition(":")
    created: Task = getattr(importlib.import_module(module), name)(config.with_num_workers(rest[-1]), *rest)
    return created


def order_of(config: Any, train: Any) -> dict[str, Any]:
    """Return the arguments of `Task` by which the prepared data of training are read in their order."""
    plan = train.plan(seed=config.run.seed, window_size=config.data.shuffle_window)
    return {"plan": plan, "reader_resources": config.data.resources}


def check_continues(config: TrainingConfig, path: str, found: BaseReference) -> BaseReference:
    """Return the frozen base that is there now; a run that has begun on another one of the same name must not go on."""
    held = read_json(f"{config.run.directory}/{BASE_FILE}")
    if held is not None:
        try:
            BaseReference(path=found.path, digest=held["digest"]).check(found.digest)
        except ValueError as error:
            raise ValueError(
                f"model.path = {path!r}: run.name = {config.run.name!r} cannot continue: {error}; or choose another run.name"
            ) from error
    return found


def load_stored(wanted: Stored, data: Any, *, what: str, job: str) -> Stored:
    """Return what a frozen base has computed for prepared data, as a job wants it; `what` says what is missing if it is."""
    try:
        found: Stored = type(wanted).load(wanted.directory, data)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"model.features = True, but {what} in {wanted.directory}: store them by the same command with "
            f"jobs.prepare_features in the place of {job}"
        ) from error
    return found


def check_resources(data: ReadSection, max_wait_minutes: float) -> None:
    """Check that some node has the custom resources of the tasks that read."""
    if data.resources:  # a run in this process does without Ray, whose import takes seconds
        from jobs.engine.cluster import check_placement

        check_placement("data.reader_resources", data.resources, max_wait_minutes)


def num_stored_readers(directory: str) -> int:
    """Return the number of readers of stored features; local files are memory-mapped, which is faster without any."""
    return 0 if is_local(resolve(directory)[0]) else 1


def cache_bytes(data: ReadSection, *, plan: StreamPlan, shard_bytes: Sequence[int], split: str = "") -> int:
    """Return the size in bytes of the cache for reading shards: 0 if it is smaller than their largest window.

    The order within a window is random, so that with less a part of the samples would take requests of their own. Shards that
    are in no object store have 0 bytes. If the split is named, a cache that is too small is reported on the terminal.
    """
    if not data.cache_gib or not sum(shard_bytes):
        return 0
    need = plan.cache_need(shard_bytes)
    if need <= data.cache_gib * GIB:
        return round(data.cache_gib * GIB)
    if split:
        enough = f"{math.ceil(need / GIB * 100) / 100:g}"  # rounded up, so that a cache of this size is large enough
        print(
            f"warning: data.cache_gib = {data.cache_gib:g} is less than the {enough} GiB that the largest window of "
            f"data.{split} takes, so data are read from the object store without a cache, sample by sample: set "
            f"data.cache_gib to {enough} or more (twice as much lets the next window be fetched ahead), with room for "
            f"it in ${DIRECTORY_VARIABLE} on every node, or choose a smaller data.shuffle_window",
            flush=True,
        )
    return 0


def feature_cache(config: Any, data: Any, kinds: Sequence[FeatureFiles], *, split: str = "") -> int:
    """Return what :func:`cache_bytes` does, for the stored features of a data set, given by its manifest."""
    plan = data.plan(seed=config.run.seed, window_size=config.data.shuffle_window)
    is_remote = not is_local(resolve(kinds[0].directory)[0])
    sizes = sum(np.array(files.shard_sizes) * files.bytes_per_row * is_remote for files in kinds)
    return cache_bytes(config.data, plan=plan, shard_bytes=np.asarray(sizes).tolist(), split=split)


def resolve_paths(config: Config) -> Config:
    """Return the configuration for the workers: with absolute paths, the resolved storage, no field that leaves its value to
    the machine, and, if it has a `tokenizer`, with its name in `data.tokenizer`.
    """
    given: Any = config  # the data section and the tokenizer differ between tasks
    changes: dict[str, Any] = {"run": config.run.resolved}
    if hasattr(given, "tokenizer"):
        changes["data"] = dataclasses.replace(given.data, tokenizer=given.tokenizer)
    return with_absolute_paths(resolve_fields(dataclasses.replace(config, **changes)))


def base_and_tempnet_groups(
    base: Sequence[nn.Module | None], tempnets: Sequence[nn.Module | None], settings: OptimizerSection
) -> list[ParameterGroup]:
    """Return two parameter groups, the base model and the TempNets, each with its own learning rate."""
    return [
        {"name": "base", "parameters": trainable(*base), "learning_rate": settings.learning_rate_base},
        {"name": "tempnet", "parameters": trainable(*tempnets), "learning_rate": settings.learning_rate_tempnet},
    ]


class UnimodalTask(Task[Config]):
    """A task whose module has the parts of an encoder and, as `loss`, a loss on one modality; None: the loss is not used."""

    @property
    def sample_state(self) -> SampleState | None:
        """What the loss remembers of every sample; None if it remembers nothing."""
        return self.module.loss and self.module.loss.bimodal.state

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: the encoder with its head, the loss's learned scalars and normalisers; and the TempNet."""
        loss = self.module.loss
        base = [part for name, part in self.module.named_children() if name != "loss"]
        base += [loss.bimodal.learned, loss.bimodal.image_normaliser] if loss else []
        return base_and_tempnet_groups(base, [loss and loss.tempnet], self.config.optimizer)

    @abstractmethod
    def inputs(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of the module, except γ."""

    @abstractmethod
    def statistics(self, output: Any, batch: Batch) -> Statistics:
        """Return the statistics of a step."""

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        config: Any = self.config
        gamma = gamma_at(config.temperature.loss_config, step, config.run.num_steps)
        output = engine(**self.inputs(batch, engine.device), gamma=gamma)
        engine.backward(output["loss"])
        engine.step()
        statistics = self.statistics(output, batch) if with_statistics else None
        return StepResult(output["loss"].detach() / self.world_size, statistics)

    def tau_scores(self, tau: Tensor | None) -> dict[str, float]:
        """Return mean and spread of predicted temperatures; without them the learned one, if there is one."""
        if tau is not None:
            return {"tau_mean": float(tau.double().mean()), "tau_std": float(tau.double().std())}
        learned = self.module.loss.bimodal.learned
        return {} if learned is None else {"tau_mean": float(learned())}

    def save_tempnet(self, export: Path) -> None:
        """Save the TempNet, if there is one, into the directory of an export."""
        if self.module.loss is not None and self.module.loss.tempnet is not None:
            self.module.loss.tempnet.save_pretrained(export / PAIRED_DIRECTORY)


def loss_networks(temperature: ContrastiveSection, width: int, *modalities: str) -> dict[str, Any]:
    """Return the new networks of a contrastive loss, which read embeddings of this width, by their names in the loss.

    The names begin with those of the modalities, if there are several (`image`, `text`).
    """
    prefixes, loss = [f"{name}_" for name in modalities] or [""], temperature.loss_config
    networks: dict[str, Any] = {}
    if temperature.needs_tempnets:
        networks = {f"{prefix}tempnet": TempNet(temperature.network_config(width)) for prefix in prefixes}
    normalisers = [NormaliserNet.for_loss(loss, width, temperature.num_prototypes) for _ in prefixes]
    return networks | {f"{prefix}normaliser": one for prefix, one in zip(prefixes, normalisers, strict=True)}


def loss_state(
    temperature: ContrastiveSection, *, num_samples: int | None, world: World, device: torch.device
) -> SampleState | None:
    """Return the new state of a loss, divided among the ranks; None for a loss that keeps none, which knows no number."""
    if not (columns := temperature.loss_config.state_columns):
        return None
    assert num_samples is not None  # plans refuse the other case
    return SampleState(num_samples, columns, world=world, device=device)


def unimodal_loss(
    temperature: UnimodalSection, width: int, *, num_samples: int | None, device: torch.device
) -> UnimodalLoss:
    """Return a new loss with its state of the samples, whose number may be unknown (None) if it keeps none."""
    world = World.current()
    state = loss_state(temperature, num_samples=num_samples, world=world, device=device)
    return UnimodalLoss(temperature.loss_config, **loss_networks(temperature, width), state=state, world=world)


def describe_tau(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the line of a report with the mean temperature and its spread, if they are known."""
    spread = f" ± {scores['tau_std']:.4f}" if "tau_std" in scores else ""
    return [("mean τ", f"{scores['tau_mean']:.4f}{spread}")] if "tau_mean" in scores else []


def autocast_dtype(config: TrainingConfig) -> torch.dtype | None:
    """Return the autocast dtype of a model's matrix products; None for float32."""
    return torch.bfloat16 if config.workers.resolved_precision == "bf16" else None


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a part of a batch to the device; to a GPU from pinned memory, so that the copy waits for no earlier step."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def count_parameters(*modules: nn.Module | None) -> int:
    """Return the number of parameters of the modules; None has none."""
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Begin the message of a ValueError or OSError raised inside the block with the name of a field."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise type(error)(f"{field}{error}") from error


def encode_all(encode: Callable[[np.ndarray], Tensor], numbers: np.ndarray, world: World, batch_size: int) -> Tensor:
    """Return the embeddings of numbered items, of which every rank encodes a part. All ranks must call this."""
    share = -(-len(numbers) // world.size)
    mine = np.resize(numbers, share * world.size)[world.rank * share : (world.rank + 1) * share]
    parts = [encode(mine[at : at + batch_size]) for at in range(0, share, batch_size)]
    return world.gather(torch.cat(parts))[: len(numbers)]


def build_encoder(
    config: Any, head: Any, tokenizer: PreTrainedTokenizerFast, *, what: str, num_tokens: int, **options: Any
) -> PreTrainedModel:
    """Build an encoder with its head, pretrained or a random RoBERTa for `num_tokens` tokens, the same on every rank."""
    torch.manual_seed(config.run.seed)
    settings: EncoderSection = config.model
    model: PreTrainedModel
    if settings.path:
        place = checked_copy(settings.path, "model.path = ")
        check_weight_files(place)
        try:
            model = load_fitting(
                head, place, may_replace_head=True, dtype=torch.float32, use_safetensors=True,
                attn_implementation=settings.attention, **options,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"model.path = {settings.path!r} holds no {what}: {reason}") from error
    else:
        roberta = AutoConfig.for_model(
            "roberta",
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=4 * settings.hidden_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_heads,
            hidden_dropout_prob=settings.dropout,
            attention_probs_dropout_prob=settings.dropout,
            # RoBERTa numbers positions from the padding token's id + 1.
            max_position_embeddings=num_tokens + int(tokenizer.pad_token_id) + 1,
            type_vocab_size=1,
            pad_token_id=tokenizer.pad_token_id,
            **options,
        )
        model = head.from_config(roberta, attn_implementation=settings.attention)
    if config.workers.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check_vocabulary(model, tokenizer, config.tokenizer, what="encoder")
    return model


def draw_samples(num_samples: int, count: int, seed: int) -> np.ndarray:
    """Draw the sorted numbers of `count` distinct samples, the same on every rank."""
    return np.sort(np.random.default_rng([seed, num_samples]).choice(num_samples, size=count, replace=False))


def check_vocabulary(
    encoder: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokenizer_name: str, *, what: str
) -> None:
    """Raise ValueError if the tokenizer has more tokens than the encoder has embeddings; `what` names the encoder."""
    num_embeddings = next(encoder.get_input_embeddings().parameters()).shape[0]
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"data.tokenizer = {tokenizer_name!r} has {len(tokenizer)} tokens, more than the {num_embeddings} "
            f"embeddings of the {what}: use the encoder's own tokenizer"
        )
