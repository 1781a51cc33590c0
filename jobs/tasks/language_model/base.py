"""The frozen base model of a run: which one it is, and whether its weights can be held as the run asks for."""

from __future__ import annotations

from transformers import PreTrainedModel

from jobs.tasks.base import naming_field
from jobs.tasks.frozen_base import check_continues
from jobs.tasks.language_model.config import LanguageModelConfig
from pipelines.local_copy import local_copy
from tempnet.base_model import BaseReference, base_digest, read_reference
from tempnet.devices import linear_weights, loading_options


def refer_to_base(config: LanguageModelConfig) -> BaseReference:
    """Return the reference to the frozen base model of a run.

    If model.path is an export that itself refers to a base, it is that base. The digest of a model at a URI is computed
    by a Ray task, because the driver may have no room for its weights, unless it trains itself.

    Args:
        config: configuration of the run, with absolute paths.

    Raises:
        ValueError: if the run's directory names another base than the one that is there now, or if the base that an
            export refers to was replaced.
    """
    path, is_local = config.model.path, config.workers.local
    reference = read_reference(local_copy(path, with_weights=False))
    found = BaseReference(path=reference.path, digest=_digest(reference.path, is_local=is_local)) if reference else None
    if reference is not None and found is not None:
        reference.check(found.digest)
    found = found or BaseReference(path=path, digest=_digest(path, is_local=is_local))
    check_continues(config, path, found)
    return found


def check_eight_bits(config: LanguageModelConfig, base: PreTrainedModel) -> None:
    """Check that torchao is there, and that the base has linear layers, which alone are held in eight bits.

    Raises:
        ValueError: naming the field.
    """
    with naming_field("model."):
        loading_options(config.base_precision)
    if not linear_weights(base):
        raise ValueError(
            f"model.precision = {config.model.precision}: {config.model.path} is a {type(base).__name__}, which has no "
            "linear layers that could be held in eight bits: leave it out"
        )


def _digest(path: str, *, is_local: bool) -> str:
    if "://" not in path or is_local:
        return _digest_of_copy(path)
    import ray

    from jobs.engine.cluster import start_ray

    start_ray()
    digest: str = ray.get(ray.remote(_digest_of_copy).options(num_cpus=0).remote(path))
    return digest


def _digest_of_copy(uri: str) -> str:
    return base_digest(local_copy(uri))
