"""Calibrate τ_max: find the τ_max with which a TempNet has a wanted mean τ over generated text, and save it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding

from jobs.engine.export import open_export
from jobs.scoring.calibration.config import TauMax
from jobs.tasks.base import naming_field
from pipelines.lines import decode, lines_of
from pipelines.local_copy import check_source, local_copy
from pipelines.storage import join
from pipelines.text.tokenization import encode_prompt, load_tokenizer
from tempnet.calibration import CalibrationError, Share, share_of_range, tau_max_for_mean
from tempnet.devices import input_device
from tempnet.inference import CachedFold, end_ids, generate
from tempnet.loading import find_tempnet, load_causal_lm
from tempnet.network import TempNet


def calibrate_tau_max(job: TauMax) -> None:
    """Run the subcommand `tau-max`: generate, search, print the result and save it with the TempNet."""
    places = _copy_inputs(job)
    source, place = job.tempnet or job.model, places["tempnet"] or places["model"]
    directory = find_tempnet(place)
    if directory is None and not job.dry_run:
        raise ValueError(
            f"{source} is no local directory of a TempNet that was saved by this project, so there is nowhere to save "
            "tau_max_eval: add --dry-run to see the figure only"
        )
    lines = lines_of(decode(Path(places["prompts"]).read_bytes()))
    prompts = [line for line in lines if line.strip()][: job.num_prompts]
    if not prompts:
        raise ValueError(f"{job.prompts} holds no prompt")
    base, network = load_causal_lm(
        places["model"], places["tempnet"] or None, device_map=job.device_map, fetch=local_copy
    )
    tokenizer = load_tokenizer(job.model)
    tokenizer.padding_side = "left"
    tokenizer.pad_token_id = tokenizer.eos_token_id
    batches = _tokenize(
        job, prompts, tokenizer, getattr(base.config.get_text_config(), "max_position_embeddings", None)
    )
    ends = end_ids(base, tokenizer)
    fold = CachedFold.of(base, network)

    def temperatures_of_texts(seed: int) -> list[Tensor]:
        """Generate a text for every prompt, and return the τ of its tokens for each text."""
        texts = []
        torch.manual_seed(seed)
        for batch in batches:
            batch = batch.to(input_device(base))
            length = batch["input_ids"].shape[1]
            result = generate(base, network, fold=fold, **batch, max_new_tokens=job.num_new_tokens, eos_token_id=ends)
            is_end = torch.isin(result.sequences[:, length:], torch.tensor(ends, device=result.sequences.device))
            is_beyond = is_end.int().cumsum(-1) - is_end.int() > 0
            texts += [tau[~beyond] for tau, beyond in zip(result.temperatures, is_beyond, strict=True)]
        return texts

    uncertainty = search_tau_max(job, network, temperatures_of_texts)
    print(f"τ_max = {network.config.tau_max_eval:.4f} gives a mean τ of {job.mean_tau:g} ± {uncertainty:.4f}")
    if job.dry_run or directory is None:
        return
    within = directory.relative_to(place)
    saved = join(source, str(within)) if within.parts else source
    with open_export(saved) as copy:
        network.save_pretrained(copy)
    print(f"tau_max_eval = {network.config.tau_max_eval:.4f} is saved in {saved}")


def search_tau_max(job: TauMax, network: TempNet, temperatures_of_texts: Callable[[int], list[Tensor]]) -> float:
    """Set the network's `tau_max_eval` so that the mean τ over generated text is `job.mean_tau`, and print each round.

    A round generates texts and updates τ_max by a step that would be exact if the contexts stayed the same, until the
    standard error of the mean τ is at most `job.tolerance`.
    """
    print(f"{'round':>6}{'τ_max':>10}{'mean τ':>10}{'pooled: next τ_max':>22}{'± mean τ':>12}")
    shares: list[Tensor] = []
    for number in range(1, job.max_rounds + 1):
        now = network.config.inference_tau_max
        texts = temperatures_of_texts(job.seed + number)
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
            return uncertainty
    raise CalibrationError(
        f"after {job.max_rounds} rounds the mean temperature is only known to ± {uncertainty:.4f}, but the tolerance is "
        f"{job.tolerance:g}: generate more (num_new_tokens, num_prompts), or allow a larger tolerance"
    )


def _copy_inputs(job: TauMax) -> dict[str, str]:
    """Return the local paths of the model, the TempNet and the prompts, by field; those at URIs are copied first."""
    places = {}
    for field in ("model", "tempnet", "prompts"):
        with naming_field(f"{field} = "):
            places[field] = local_copy(getattr(job, field))
            if field != "prompts":
                check_source(places[field] or ".")
    if not Path(places["prompts"]).exists():
        raise FileNotFoundError(f"prompts = {job.prompts!r} is missing: there is no such file")
    return places


def _tokenize(job: TauMax, prompts: list[str], tokenizer: Any, num_positions: int | None) -> list[BatchEncoding]:
    """Return the prompts, cut to leave room for the generated tokens, as batches; each begins as a document in training."""
    room = None if num_positions is None else num_positions - job.num_new_tokens
    if room is not None and room < 1:
        raise ValueError(f"num_new_tokens = {job.num_new_tokens} leaves no room in the model's context")
    ids = [encode_prompt(tokenizer, prompt)[:room] for prompt in prompts]
    return [
        tokenizer.pad({"input_ids": ids[at : at + job.batch_size]}, return_tensors="pt")
        for at in range(0, len(ids), job.batch_size)
    ]
