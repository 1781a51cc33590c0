"""Generate texts for the prompts in a file with a model and its TempNet (or at a fixed temperature, or greedily).

    python -m jobs.generate --model runs/gpt2-scratch-small/export --prompts prompts.txt --output texts.jsonl
--max-new-tokens 64
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job, show
from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.gsm8k import majority_score

if TYPE_CHECKING:
    from jobs.scoring.generation.job import Outcome

# Maximum number of texts on the HTML page; a page of more texts is slow to open.
MAX_SECTIONS = 200
# Texts that are printed, and characters of each and of its prompt; the file holds all of them.
MAX_PRINTED, MAX_CHARACTERS = 5, 400


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    config = parse_options(GenerateConfig, arguments, job="generate", description=__doc__)
    # Imported only now, so that an error in the arguments is reported without waiting for Transformers to load.
    from jobs.scoring.generation.job import run
    from pipelines.storage import write_bytes

    with ending_in_one_line():
        outcomes, configs = [], (config, *config.others())
        for one in configs if config.judged else ():
            judgement(one)  # so that a wrong file is refused before anything is generated
        for one in configs:
            outcomes.append((outcome := run(one), one))
            show(sample(outcome))
            show(describe(outcome, one))
        if config.html:
            write_bytes(config.html, page(outcomes).encode())
            print(f"{config.html} shows every token coloured by its τ")
    return 0


def sample(outcome: Outcome) -> str:
    """Return the first texts for the terminal, each after the end of its prompt."""
    lines = []
    for key in outcome.known()[:MAX_PRINTED]:
        record = outcome.file.records[key]
        lines.append(
            f"[{key[0]}] …{record['prompt'][-MAX_CHARACTERS:]}\n  → {record['text'][:MAX_CHARACTERS].strip()}\n"
        )
    return "\n".join(lines)


def describe(outcome: Outcome, config: GenerateConfig) -> str:
    """Return text for the terminal: what was generated, which prompts were too long, and the scores."""
    records = [outcome.file.records[key] for key in outcome.known()]
    lines = [f"{len(records)} texts in {outcome.file.path}, {outcome.num_kept} of them from before"]
    if outcome.seconds:
        speed = outcome.num_tokens / outcome.seconds
        lines.append(f"{outcome.num_tokens} tokens in {outcome.seconds:.1f} s, {speed:.1f} a second")
    if tau := [value for record in records for value in record["tau"] or []]:
        low, middle, high = np.quantile(tau, [0.05, 0.5, 0.95])
        lines.append(f"mean τ {np.mean(tau):.3f}; 5 %, 50 %, 95 %: {low:.3f}, {middle:.3f}, {high:.3f}")
    if outcome.lost:
        ids = list(dict.fromkeys(str(identity) for identity, _, _ in outcome.lost))
        named = ", ".join(ids[:10]) + (", …" if len(ids) > 10 else "")
        lines.append(
            f"LOST: {len(outcome.lost)} texts of {len(ids)} prompts, which are longer than the {outcome.room} tokens "
            f"that the context leaves beside max_new_tokens = {config.max_new_tokens}; ids {named}"
        )
    if config.format == "gsm8k":
        lines += _scores(outcome, config)
    elif outcome.file.path != config.output:
        lines.append(f"{config.output} holds them as {config.format} wants them")
    if config.judged:
        lines.append(judgement(config))
    return "\n".join(lines)


def judgement(config: GenerateConfig) -> str:
    """Return the score of the texts by the judge's answers in `--judged`."""
    from jobs.scoring.generation.formats import describe_judged

    return describe_judged(config.judged, config.format, config.generator or config.model)


def _scores(outcome: Outcome, config: GenerateConfig) -> list[str]:
    """Return maj@k (accuracy of the majority of k answers) over the questions that were not too long."""
    records, lines = outcome.file.records, []
    answered = [prompt for prompt in outcome.prompts if outcome.texts(prompt) is not None]
    for k in [k for k in range(1, config.num_samples + 1) if config.num_samples % k == 0]:
        scores = [
            majority_score(
                [
                    (record["answer"], record["is_correct"])
                    for sample in range(config.num_samples)
                    if (record := records[prompt.id, sample, 0])
                ],
                k,
            )
            for prompt in answered
        ]
        lines.append(f"maj@{k}: {np.mean(scores):.2%} of {len(scores)} questions")
    return lines


def page(outcomes: Sequence[tuple[Outcome, GenerateConfig]]) -> str:
    """Return an HTML page of the generated tokens, coloured by τ, which shows τ and entropy on hover.

    Texts of one prompt at several temperatures stand under one another.
    """
    from jobs.tasks.language_model.report import coloured_page

    sections, (first, config) = {}, outcomes[0]
    keys = first.known()
    for key in keys[: MAX_SECTIONS // len(outcomes)]:
        for outcome, one in outcomes:
            if (record := outcome.file.records.get(key)) is None:
                continue
            prompt = record["prompt"] if len(record["prompt"]) <= 120 else f"… {record['prompt'][-120:]}"
            at = f", τ = {one.temperature}" if outcome is not first else ""
            heading = f"{key[0]} (sample {key[1]}, turn {key[2] + 1}{at}): {prompt}"
            sections[heading] = (record["tokens"], record["tau"], record["entropy"], [""] * len(record["tokens"]))
    described = "\n".join(describe(*one) for one in outcomes)
    return coloured_page(
        title=f"Texts of {config.generator or config.model}",
        sections=sections,
        summary=f"{len(sections)} of {sum(len(outcome.known()) for outcome, _ in outcomes)} texts\n{described}",
    )


if __name__ == "__main__":
    run_job(main)
