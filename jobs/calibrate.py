"""Choose ρ for a base model before training, or τ_max of a trained TempNet for generation.

python -m jobs.calibrate rho --model runs/gpt2-scratch-small/export --text data/sample/text/train
python -m jobs.calibrate tau-max --model runs/gpt2-scratch-small/export --prompts prompts.txt --mean-tau 0.7
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from jobs.engine.command_line import fail, refusals_on_one_line, run_job

_DEFAULT_CONTEXT_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rho:
    """Compute the mean optimal temperature τ* of a base model over a range of ρ, and find the ρ for a wanted mean."""

    model: str
    """Directory, URI or hub name of a Transformers causal LM."""
    text: str
    """Path or URI of the text: a file or a directory of files, in the formats that `train_lm` reads."""
    tokenizer: str = ""
    """Directory, URI or hub name of the tokenizer, or a tokenizer.json file. If empty: the model's own tokenizer."""
    tau: float = 0.85
    """The wanted mean temperature. The default is the centre of the papers' band [0.7, 1.0]."""
    tau_min: float = 0.001
    """τ₀, the lower bound of the temperature."""
    tau_max: float = 2.0
    """τ_max, the upper bound of the temperature."""
    num_tokens: int = 4096
    """Number of tokens in the sample of text."""
    context_length: int = 0
    """Number of tokens per block. 0: 256, or the number of the model's positions if that is smaller."""
    attend_across_documents: bool = False
    """Whether a document attends to the documents before it in the same block."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the model is run."""
    use_gpu: bool = False
    """Run the model on a GPU of the cluster."""
    storage: str = ""
    """Directory or URI for the prepared text. If empty: $TEMPNET_HOME, else ./runs."""
    output: str = "calibration"
    """Directory or URI for calibration.json and curve.png."""
    trust_remote_code: bool = False
    """Allow Transformers to run code that comes with the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TauMax:
    """Find the τ_max with which a trained TempNet has a wanted mean τ over generated text, and save it with the TempNet."""

    model: str
    """Directory, URI or hub name of an export, or of any Transformers causal LM together with --tempnet."""
    prompts: str
    """Text file (path or URI) with one prompt per line."""
    tempnet: str = ""
    """Directory, URI or hub name of the TempNet. If empty: the TempNet in the model's directory."""
    mean_tau: float = 0.7
    """The wanted mean temperature (TempNet §6.4 uses 0.7 for chat)."""
    num_prompts: int = 32
    """Number of prompts to use, counted from the first."""
    num_new_tokens: int = 32
    """Number of tokens to generate for each prompt; the mean is taken over these tokens."""
    tolerance: float = 0.01
    """Standard error of the mean at which the search stops."""
    max_rounds: int = 20
    """Maximum number of rounds, each of which generates a text for every prompt."""
    batch_size: int = 8
    """Number of prompts to generate from at the same time."""
    seed: int = 0
    """Random seed of the sampling of tokens."""
    dry_run: bool = False
    """Print the result without saving it with the TempNet."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_new_tokens", "max_rounds", "batch_size", "tolerance", "mean_tau"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")


def calibrate_rho(job: Rho) -> None:
    """Run the subcommand `rho`: prepare the text, calibrate in a Ray task, print and plot the result."""
    from jobs.engine.cluster import start_ray
    from jobs.engine.config import RunSection, WorkersSection
    from jobs.engine.export import open_export
    from jobs.tasks.base import resolve_paths
    from jobs.tasks.language_model.calibration import calibrate
    from jobs.tasks.language_model.config import (
        DataSection,
        LanguageModelConfig,
        ModelSection,
        TemperatureSection,
    )
    from jobs.tasks.language_model.data import blocks_layout
    from jobs.tasks.language_model.models import base_shapes
    from jobs.tasks.text.data import prepare_split
    from pipelines.archives import list_archives
    from pipelines.text.tokenization import load_tokenizer

    config = LanguageModelConfig(
        run=RunSection(name="calibration", storage=job.storage),
        data=DataSection(
            train=job.text,
            validation=job.text,
            tokenizer=job.tokenizer,
            context_length=job.context_length or 2,  # a placeholder until the model's is known
            attend_across_documents=job.attend_across_documents,
        ),
        model=ModelSection(path=job.model, trust_remote_code=job.trust_remote_code),
        temperature=TemperatureSection(
            rho=None,
            calibrated_tau=job.tau,
            tau_min=job.tau_min,
            tau_max=job.tau_max,
            num_calibration_tokens=job.num_tokens,
        ),
        workers=WorkersSection(precision=job.precision, use_gpu=job.use_gpu),
    )
    list_archives(job.text)
    base = base_shapes(config, load_tokenizer(config.tokenizer)).config
    if not job.context_length:
        length = min(_DEFAULT_CONTEXT_LENGTH, getattr(base, "max_position_embeddings", None) or _DEFAULT_CONTEXT_LENGTH)
        config = replace(config, data=replace(config.data, context_length=length))
    config = resolve_paths(config)
    start_ray()
    started = time.monotonic()
    values = calibrate(config, prepare_split(config, blocks_layout(config), "train"))
    with open_export(job.output) as output:
        (output / "calibration.json").write_text(json.dumps(values, indent=1) + "\n")
        plot(values, output / "curve.png", wanted=job.tau)
    curve = values["curve"]
    print(f"{'ρ':>8}{'target entropy':>16}{'mean τ*':>10}{'std':>8}")
    for row in zip(curve["rho"], curve["target_entropy"], curve["tau_mean"], curve["tau_std"], strict=True):
        print(f"{row[0]:>8.3f}{row[1]:>16.3f}{row[2]:>10.3f}{row[3]:>8.3f}")
    print(
        f"\nρ = {values['rho']:.4f} (target entropy {values['target_entropy']:.4f} nats) has mean τ* = "
        f"{values['tau_mean']:.4f} ± {values['tau_std']:.4f} over {values['num_contexts']:,} contexts\n"
        f"{time.monotonic() - started:.0f} s; {job.output}/curve.png shows the curve. Train with\n"
        f"  --temperature.target-entropy {values['target_entropy']:.4f}"
    )


def plot(values: dict[str, Any], path: Path, *, wanted: float) -> None:
    """Plot the mean optimal temperature τ* over ρ with its standard deviation, the wanted mean and the ρ that gives it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curve = values["curve"]
    low = [mean - std for mean, std in zip(curve["tau_mean"], curve["tau_std"], strict=True)]
    high = [mean + std for mean, std in zip(curve["tau_mean"], curve["tau_std"], strict=True)]
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    axis.fill_between(curve["rho"], low, high, alpha=0.2, label="± one standard deviation of τ*")
    axis.plot(curve["rho"], curve["tau_mean"], marker=".", label="mean τ*")
    axis.axhline(wanted, linestyle=":", color="black")
    axis.plot([values["rho"]], [values["tau_mean"]], "o", color="black", label=f"ρ = {values['rho']:.3f}")
    axis.set(xlabel="ρ (nats)", ylabel="optimal temperature τ*", ylim=(0, None))
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def calibrate_tau_max(job: TauMax) -> None:
    """Run the subcommand `tau-max`.

    Every round generates texts and updates τ_max by a step that would be exact if the contexts stayed the same. Rounds
    are repeated until the standard error of the mean τ is small enough.

    Raises:
        CalibrationError: if it is not small enough after `max_rounds` rounds.
    """
    import torch

    from jobs.engine.export import open_export
    from pipelines.local_copy import local_copy
    from pipelines.sources import check_source
    from pipelines.storage import join
    from pipelines.text.tokenization import load_tokenizer
    from tempnet.calibration import CalibrationError, Share, share_of_range, tau_max_for_mean
    from tempnet.inference import CachedFold, can_fold, generate
    from tempnet.loading import find_tempnet, load_causal_lm

    places = {}
    for field in ("model", "tempnet", "prompts"):
        try:
            places[field] = local_copy(getattr(job, field))
            if field != "prompts":
                check_source(places[field] or ".")
        except ValueError as error:
            raise ValueError(f"{field} = {error}") from error
    if not Path(places["prompts"]).exists():
        raise FileNotFoundError(f"prompts = {job.prompts!r} is missing: there is no such file")
    source, place = job.tempnet or job.model, places["tempnet"] or places["model"]
    directory = find_tempnet(place)
    if directory is None and not job.dry_run:
        raise ValueError(
            f"{source} is no local directory of a TempNet that was saved by this project, so there is nowhere to save "
            "tau_max_eval: add --dry-run to see the figure only"
        )
    prompts = [line for line in Path(places["prompts"]).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{job.prompts} holds no prompt")
    base, network = load_causal_lm(places["model"], places["tempnet"] or None)
    tokenizer = load_tokenizer(job.model)
    tokenizer.padding_side = "left"
    tokenizer.pad_token_id = tokenizer.eos_token_id
    # Prompts are truncated to leave room for the generated tokens, which are all that the mean τ is taken over.
    room = base.config.max_position_embeddings - job.num_new_tokens
    if room < 1:
        raise ValueError(f"num_new_tokens = {job.num_new_tokens} leaves no room in the model's context")
    chosen = prompts[: job.num_prompts]
    batches = [
        tokenizer(chosen[at : at + job.batch_size], return_tensors="pt", padding=True, truncation=True, max_length=room)
        for at in range(0, len(chosen), job.batch_size)
    ]
    fold = CachedFold.of(base, network) if can_fold(base, network) else None

    def generate_texts(seed: int) -> list[torch.Tensor]:
        """Generate a text for every prompt, and return the τ of its tokens for each text."""
        texts = []
        torch.manual_seed(seed)
        for batch in batches:
            length = batch["input_ids"].shape[1]
            result = generate(base, network, fold=fold, **batch, max_new_tokens=job.num_new_tokens)
            is_end = result.sequences[:, length:] == tokenizer.eos_token_id
            is_beyond = is_end.int().cumsum(-1) - is_end.int() > 0
            texts += [tau[~beyond] for tau, beyond in zip(result.temperatures, is_beyond, strict=True)]
        return texts

    print(f"{'round':>6}{'τ_max':>10}{'mean τ':>10}{'pooled: next τ_max':>22}{'± mean τ':>12}")
    shares: list[torch.Tensor] = []
    for number in range(1, job.max_rounds + 1):
        now = network.config.tau_max if network.config.tau_max_eval is None else network.config.tau_max_eval
        texts = generate_texts(job.seed + number)
        new_shares = [share_of_range(text, network.config) for text in texts]
        # The texts of the first round are not pooled: they were generated with a τ_max that may be far from the result.
        shares = new_shares if number <= 2 else shares + new_shares
        share = Share.of(shares)
        network.set_tau_max_eval(tau_max_for_mean(network.config, share.mean, wanted=job.mean_tau))
        uncertainty = share.standard_error * job.mean_tau / share.mean
        mean = torch.cat(texts).mean().item()
        print(
            f"{number:>6}{now:>10.4f}{mean:>10.4f}{network.config.tau_max_eval:>22.4f}{uncertainty:>12.4f}", flush=True
        )
        if number > 1 and uncertainty <= job.tolerance:
            break
    else:
        raise CalibrationError(
            f"after {job.max_rounds} rounds the mean temperature is only known to ± {uncertainty:.4f}, wanted is "
            f"{job.tolerance:g}: generate more (num_new_tokens, num_prompts), or allow a larger tolerance"
        )
    print(f"τ_max = {network.config.tau_max_eval:.4f} gives a mean τ of {job.mean_tau:g} ± {uncertainty:.4f}")
    if job.dry_run or directory is None:
        return
    within = directory.relative_to(place)
    saved = join(source, str(within)) if within.parts else source
    with open_export(saved) as copy:
        network.save_pretrained(copy)
    print(f"tau_max_eval = {network.config.tau_max_eval:.4f} is saved in {saved}")


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    with refusals_on_one_line():
        job = tyro.extras.subcommand_cli_from_dict(
            {"rho": Rho, "tau-max": TauMax}, args=arguments, prog="python -m jobs.calibrate", description=__doc__
        )
    try:
        calibrate_rho(job) if isinstance(job, Rho) else calibrate_tau_max(job)
    except (ValueError, OSError) as error:
        fail(str(error))
    return 0


if __name__ == "__main__":
    run_job(main)
