r"""Predict temperatures with a trained model: for every token of your own text, or for image-text pairs.

    python -m jobs.predict_temperatures --model runs/gpt2-scratch-small/export --text data/sample/text/validation \
    --output temperatures
    python -m jobs.predict_temperatures --model runs/gpt2-scratch-small/export --text README.md --html temperatures.html

    python -m jobs.predict_temperatures --model runs/clip-cc12m-tempnet-frozen/export --images data/cc3m \
    --output temperatures-cc3m

The first command writes tables, using Ray, and continues if it was interrupted. The second writes an HTML page that
shows the first tokens, coloured by temperature. The third writes two temperatures for every pair, which the loss
`sogclr_given` trains with, and with `--html` a page of the lowest and highest ones; `--images --help` lists its options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job
from jobs.scoring.temperatures.config import PredictPairTemperaturesConfig, PredictTemperaturesConfig

Config = TypeVar("Config")

DEFAULT_PAGE = "temperatures.html"


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    if any(argument.split("=")[0] == "--images" for argument in arguments):
        return _predict_pairs(arguments)
    config = _parse(PredictTemperaturesConfig, arguments)
    from jobs.scoring.temperatures.texts import (
        check_page,
        first_documents,
        first_documents_on_worker,
        predict_archives,
        resolve_settings,
        write_page,
    )
    from jobs.scoring.units import UnitStore, absolute_output

    html = config.html or ("" if config.output else DEFAULT_PAGE)
    with ending_in_one_line():
        settings = resolve_settings(config)
        if html:
            check_page(html)
        if config.output:
            output = absolute_output(config.output)
            UnitStore(output).claim(settings.record())
            _print_summary(predict_archives(settings, output), output)
        if html:
            predict = first_documents_on_worker if config.output else first_documents
            sections = predict(settings, config.html_tokens)
            write_page(html, config.text, sections)
            tau = np.concatenate([tau for _, tau, *_ in sections.values()])
            low, middle, high = np.quantile(tau, [0.05, 0.5, 0.95])
            print(f"{len(tau)} tokens: mean τ {tau.mean():.3f}; 5 %, 50 %, 95 %: {low:.3f}, {middle:.3f}, {high:.3f}")
            print(f"{html} shows every token coloured by its τ")
    return 0


def _predict_pairs(arguments: Sequence[str]) -> int:
    config = _parse(PredictPairTemperaturesConfig, arguments)
    from jobs.scoring.temperatures.pairs import numbers_of, predict_pairs, resolve_settings, write_pair_page
    from jobs.scoring.temperatures.texts import check_page
    from jobs.scoring.units import absolute_output

    with ending_in_one_line():
        settings = resolve_settings(config)
        output = absolute_output(config.output)
        if config.html:
            check_page(config.html)
        if config.label:  # One sample with it is enough to begin; reading all of them may take minutes.
            next(numbers_of(settings.images.source, config.label))
        _print_pair_summary(predict_pairs(settings, output), output)
        if config.html:
            correlations = write_pair_page(settings, output)
            for name, (r, half) in correlations.items():
                print(f"Spearman(τ of {name}, {config.label}) = {r:+.3f} ± {half:.3f} (95 %)")
            print(f"{config.html} shows the images and captions with the lowest and the highest τ")
    return 0


def _parse(config: type[Config], arguments: Sequence[str]) -> Config:
    # Drop all other arguments if help is requested, since `--images --help` has no value for `--images`.
    arguments = ["--help"] if "--help" in arguments or "-h" in arguments else arguments
    return parse_options(config, arguments, job="predict_temperatures", description=__doc__)


def _print_pair_summary(summary: dict[str, Any], output: str) -> None:
    """Print statistics of τ and the paths of the results."""
    now, seconds = summary["num_pairs_now"], summary["seconds_now"]
    if now:
        print(
            f"{now} pairs predicted in {seconds:.0f} s, starting Ray, preparing and the models included: "
            f"{now / seconds:,.0f} pairs/s"
        )
    for name in ("tau_image", "tau_text"):
        low, high = (100 * summary[f"{name}_share_{end}_bound"] for end in ("lower", "upper"))
        print(
            f"{name:<9} mean {summary[f'{name}_mean']:.4f}, standard deviation {summary[f'{name}_std']:.4f}; "
            f"{low:.1f} % at the lower bound, {high:.1f} % at the upper"
        )
    print(f"table   {output}/part-*.parquet, one row a pair\ntotals  {output}/_summary.json")


def _print_summary(summary: dict[str, Any], output: str) -> None:
    """Print totals, statistics of τ and the paths of the results."""
    lost = ", ".join(f"{count} {kind}" for kind, count in sorted(summary["problems"].items())) or "none"
    now, seconds = summary["num_tokens_now"], summary["seconds_now"]
    print(
        f"{summary['num_documents']} documents, {summary['num_tokens']} tokens in {summary['num_parts']} parts; "
        f"unreadable: {lost}"
    )
    if now:
        print(
            f"{now} tokens predicted in {seconds:.0f} s, starting Ray and the models included: {now / seconds:,.0f} tokens/s"
        )
    if summary["num_tokens"]:
        quantiles = ", ".join(f"{summary[f'tau_q{share:02d}']:.3f}" for share in (5, 25, 50, 75, 95))
        entropy = "" if summary["entropy_mean"] is None else f"; mean entropy {summary['entropy_mean']:.3f} nats"
        print(f"mean τ {summary['tau_mean']:.3f}; 5 %, 25 %, 50 %, 75 %, 95 %: {quantiles}{entropy}")
    print(f"tables  {output}/part-*.parquet, one row a document\ntotals  {output}/_summary.json")


if __name__ == "__main__":
    run_job(main)
