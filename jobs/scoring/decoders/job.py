"""The job: text and prompts → a pool of models → the bench → one table, a frontier plot and MLflow."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from jobs.engine.export import model_digest
from jobs.engine.fields import absolute_path, flatten
from jobs.engine.report import markdown_table, picture
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Decoders
from jobs.scoring.decoders.bench import CHECKED, CONSTANT, PLAIN, BenchSettings, BenchUnit, BenchWorker, run_bench
from jobs.scoring.generation.formats import Prompt, read_prompts
from jobs.scoring.results import publish_findings
from jobs.scoring.text_parts import list_sources
from jobs.scoring.units import map_units, model_labels
from jobs.tasks.base import naming_field
from jobs.tasks.language_model.data import warn_of_known_text
from pipelines.archives import Archive
from pipelines.local_copy import checked_copy, local_copy
from pipelines.problems import check_problems
from pipelines.text.manifest import ArchiveEntry
from pipelines.text.reading import readable_documents
from pipelines.text.tokenization import document_start_id, encode_prompt, load_tokenizer
from tempnet.base_model import read_config
from tempnet.loading import load_tempnet
from tempnet.weights import check_weight_files

_MARKS = {"MeanShift": "s", "shuffled": "x"}
_NUM_NAMED = 6  # entries of the legend
_LEAST = 4
"""Number of documents and of prompts that two halves with an interval need."""


def compare_decoders(config: Decoders) -> dict[str, Any]:
    """Run the job, print its table, and return the figures."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    settings, known = resolve_settings(config)
    values = run_bench(settings, partial(run_units, settings)).values | {"known_text": known}
    if known:
        print("\nThe model was trained on some of this text: what is found does not hold for new text.")
    record = {name: value for name, value in flatten(config).items() if not name.startswith(("workers", "tracking"))}
    publish_findings(
        config,
        "decoders",
        uri=uri,
        values=values,
        table=table(values),
        conclusion=conclusion(values),
        plot_file="frontier.png",
        plot=partial(plot, values),
        metrics=_metrics(values),
        settings=record | {"model_digest": model_digest(config.model), "documents": len(settings.documents)},
        source=config.text,
    )
    return values


def resolve_settings(config: Decoders) -> tuple[BenchSettings, list[str]]:
    """Return what the bench needs, and the archives that the model was trained on."""
    with naming_field("text: "):
        archives = list_sources(config.text)
    check_weight_files(place := checked_copy(config.model, "model = "))
    tokenizer = load_tokenizer(config.model)
    with naming_field("model = "):
        model = read_config(place).get_text_config()
    context = getattr(model, "max_position_embeddings", None)
    length = min(config.tokens_per_document, context or config.tokens_per_document)
    documents = read_documents(config, archives, tokenizer, length)
    if len(documents) < _LEAST:
        raise ValueError(
            f"text = {config.text!r} has {len(documents)} documents of 2 tokens and more, and two halves need {_LEAST}"
        )
    prompts, ids = read_prompt_ids(config, documents, tokenizer, context)
    settings = BenchSettings(
        config=replace(config, model=absolute_path(config.model)),
        documents=tuple(documents),
        prompts=tuple(ids),
        asked=tuple(prompts),
        tempnets=find_tempnets(config, len(tokenizer), model.hidden_size),
    )
    return settings, warn_of_known_text(config.model, config.text, archives, field="text")


def read_documents(
    config: Decoders, archives: Sequence[Archive], tokenizer: PreTrainedTokenizerFast, length: int
) -> list[tuple[int, ...]]:
    """Return the first tokens of every document, without documents of fewer than two."""
    found: list[tuple[int, ...]] = []
    entries = []
    for archive in archives:
        problems, examples = Counter[str](), list[str]()
        read = readable_documents(config.text, archive, config.text_field, problems, examples)
        texts = [document.text for document in itertools.islice(read, config.max_documents or None)]
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found += [tuple(encoding.ids[:length]) for encoding in encoded if len(encoding.ids) > 1]
        entries.append(
            ArchiveEntry(
                path=archive.path,
                num_bytes=archive.num_bytes,
                num_documents=len(texts),
                problems=dict(problems),
                examples=examples,
                shards=[],
            )
        )
    check_problems(config.text, entries, config.max_bad_share, field="max_bad_share")
    return found


def read_prompt_ids(
    config: Decoders,
    documents: Sequence[tuple[int, ...]],
    tokenizer: PreTrainedTokenizerFast,
    context: int | None,
) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """Return the prompts that fit into the context beside the new tokens, and their token ids."""
    room = None if context is None else context - config.max_new_tokens
    start = document_start_id(tokenizer)
    if config.prompts:
        prompts = read_prompts(config.prompts, config.format, config.max_prompts)
        ids = [tuple(encode_prompt(tokenizer, prompt.turns[0])) for prompt in prompts]
    else:
        # Prompts alternate as documents do, so that one that reports comes from a document that neither trains nor chooses.
        halves = ([tokens for tokens in documents[half::2] if len(tokens) > config.prompt_tokens] for half in range(2))
        long = [tokens for both in zip(*halves, strict=False) for tokens in both][: config.max_prompts or None]
        ids = [(start, *tokens[: config.prompt_tokens]) for tokens in long]
        prompts = [Prompt(id=place, turns=(str(tokenizer.decode(list(tokens))),)) for place, tokens in enumerate(ids)]
    fitting = [place for place, tokens in enumerate(ids) if room is None or len(tokens) <= room]
    if len(fitting) < _LEAST:
        raise ValueError(
            f"{len(fitting)} of {len(ids)} prompts fit into the context of {config.model} beside max_new_tokens = "
            f"{config.max_new_tokens}, and two halves need {_LEAST}"
        )
    return [prompts[place] for place in fitting], [ids[place] for place in fitting]


def find_tempnets(config: Decoders, vocab_size: int, state_size: int) -> dict[str, str]:
    """Return the places of the given TempNets by name, or that of the one beside the model if there is one."""
    places = [absolute_path(place) for place in config.tempnets or (config.model,)]
    names = [f"TempNet {label}" for label in model_labels(places)] if config.tempnets else ["TempNet of the model"]
    found: dict[str, str] = {}
    for name, place in zip(names, places, strict=True):
        try:
            network = load_tempnet(local_copy(place))
        except FileNotFoundError:
            if config.tempnets:
                raise
            continue
        if network.config.kind == "embeddings" or network.config.input_size != vocab_size:
            raise ValueError(
                f"{place}: the TempNet was built for {network.config.input_size} {network.config.kind}, and the tokenizer of "
                f"{config.model} has {vocab_size} tokens"
            )
        if network.config.reads_state and network.config.state_size != state_size:
            raise ValueError(
                f"{place}: the TempNet reads hidden states of {network.config.state_size} numbers, those of {config.model} "
                f"have {state_size}"
            )
        found[name] = place
    return found


def run_units(settings: BenchSettings, units: Sequence[BenchUnit]) -> list[Any]:
    outcome = map_units(units, partial(BenchWorker, settings), settings.config.workers)
    outcome.check()
    return [outcome.values[number][0] for number in range(len(units))]


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of the run in MLflow, which accepts letters, digits and few other characters in their names."""
    metrics = {"num_tokens": float(values["num_tokens"])}
    for name, found in values["decoders"].items():
        short = re.sub(r"[^\w. -]", "", name)
        for measure in ("gain", "brier", "ece"):
            metrics[f"{short}/{measure}"] = found["text"][measure]["mean"]
    return metrics


def table(values: dict[str, Any]) -> str:
    k = values["k"]
    heading = ["decoder", "on text", "NLL", "gain, mnat", "Brier", "ECE, %", "left out, %"]
    heading += ["on prompts", "log p", "distinct-2", "self-BLEU"]
    if values["has_verifier"]:
        heading += ["correct, %", "distinct correct, %", f"pass@{k}, %", f"maj@{k}, %"]
    rows = [heading]
    for name, found in values["decoders"].items():
        text, prompts = found["text"], found["prompts"]
        row = [
            name,
            text["rule"],
            _show(text["loss"], 1, 3, missing="∞"),
            _show(text["gain"], 1000, 1),
            _show(text["brier"], 1, 4),
            _show(text["ece"], 100, 2),
            _show(text["excluded"], 100, 1),
            prompts["rule"],
            *(_show(prompts[measure], 1, 3) for measure in PLAIN),
        ]
        if values["has_verifier"]:
            row += [_show(prompts[measure], 100, 1) for measure in CHECKED]
        rows.append(row)
    return markdown_table(rows)


def conclusion(values: dict[str, Any]) -> str:
    """Return lines that say which decoders gain on text, over the best constant and over their own MeanShift."""

    def better(gain: str) -> str:
        figures = {name: found["text"].get(gain) for name, found in values["decoders"].items()}
        known = {name: found for name, found in figures.items() if found and None not in found.values()}
        return ", ".join(name for name, found in known.items() if found["mean"] > found["half_width"]) or "none"

    return (
        f"On text, better than the best constant τ with the whole interval: {better('gain')}.\n"
        f"Of the learned decoders, better than their own MeanShift: {better('gain_over_mean_shift')}.\n"
        f"{values['num_tokens']:,} tokens report; gains are of the smoothed NLL in thousandths of a nat per token, ± 95 % "
        "over documents or prompts. Parameters were chosen on the other half."
    )


def plot(values: dict[str, Any], path: Path) -> None:
    """Plot quality over diversity: what was tried on the choosing prompts, and the chosen rules on the reporting ones.

    A line joins the chosen rules that no other one exceeds in both; the legend names the constant, a
    TempNet, and then these. Those that it has no room for are grey, and the table names them.
    """
    from matplotlib import colormaps

    quality, title = "log_probability", "log-probability of a token under the model at τ = 1, nats"
    if values["has_verifier"]:
        quality, title = "correct", "share of correct texts"
    means = {
        name: (found["prompts"]["distinct"]["mean"], found["prompts"][quality]["mean"])
        for name, found in values["decoders"].items()
    }
    means = {name: point for name, point in means.items() if None not in point}
    best = frontier(means.values())
    # With the frontier itself and real text the legend has eight entries at most.
    first = {CONSTANT, next((name for name in means if name.startswith("TempNet")), CONSTANT)}
    named = sorted(means, key=lambda name: (name not in first, means[name] not in best))[:_NUM_NAMED]
    colours = {name: colormaps["tab10"](place) for place, name in enumerate(named)}
    with picture(path, figsize=(9, 6)) as ((axes,),):
        for name, found in values["decoders"].items():
            colour = colours.get(name, "lightgrey")
            tried = [
                (one["distinct"]["mean"], one[quality]["mean"]) for one in values["tried"] if one["decoder"] == name
            ]
            tried = [point for point in tried if None not in point]
            axes.scatter([x for x, _ in tried], [y for _, y in tried], s=9, alpha=0.4, color=colour)
            if name not in means:
                continue
            axes.errorbar(
                *means[name],
                xerr=found["prompts"]["distinct"]["half_width"] or 0.0,
                yerr=found["prompts"][quality]["half_width"] or 0.0,
                fmt=_MARKS.get(name.partition(": ")[2], "o"),
                capsize=3,
                elinewidth=0.8,
                color=colour,
                label=name if name in named else None,
                zorder=3 if name in named else 2,
            )
        axes.plot(*zip(*best, strict=True), color="black", linewidth=0.8, label="frontier")
        if not values["has_verifier"]:
            axes.axhline(-values["human_loss"], color="black", linestyle=":", label="real text")
        axes.set_title("dots: tried on the choosing prompts; marks: the others")
        axes.set(xlabel="distinct-2 (diversity)", ylabel=title)
        axes.figure.legend(fontsize=8, loc="outside lower center", ncols=2)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one exceeds in both coordinates, from the largest x to the smallest."""
    found: list[tuple[float, float]] = []
    for point in sorted(points, reverse=True):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found


def _show(values: dict[str, float | None] | None, factor: float, digits: int, *, missing: str = "") -> str:
    if values is None or values["mean"] is None:
        return missing
    half = values["half_width"]
    shown = f"{factor * values['mean']:.{digits}f}"
    return shown if half is None else f"{shown} ± {factor * half:.{digits}f}"
