"""Measure TempNets on a frozen base: 16 side by side beside one run, and stored features beside the base.

    python -m jobs.sample_data
    python -m benchmarks.frozen_grid

The bases are random GPT-2s, since speed and equality do not depend on what a base has learned. Every figure is printed
with its target. Both sides of a ratio are measured in this process, one after the other, with Ray already running and
the text already prepared.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from jobs.engine.cluster import start_ray
from jobs.engine.launch import train
from jobs.engine.task import Plan
from jobs.scoring.features.hidden_states import prepare_hidden_states
from jobs.studies.sweeps.config import LanguageModelSweep, SweepSection
from jobs.studies.sweeps.launch import run_sweep
from jobs.studies.sweeps.plan import make_sweep
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan
from jobs.tasks.presets.language_models import SAMPLE_TOKENIZER, frozen_small
from pipelines.storage import read_json
from pipelines.text.tokenization import load_tokenizer

LOSSES = ("cross_entropy", "cross_entropy_tau", "robust_loss", "tau_mean")
AXES = ("temperature.rho=2,2.5,3,3.5", "optimizer.learning_rate_tempnet=3e-3,6e-3,1e-2,2e-2")


def save_base(directory: Path, *, hidden_size: int, num_layers: int) -> None:
    """Write a random GPT-2 for the tokenizer of the sample text."""
    tokenizer = load_tokenizer(SAMPLE_TOKENIZER)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=128,
        n_embd=hidden_size,
        n_layer=num_layers,
        n_head=6,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_config(
    home: Path, base: Path, name: str, num_steps: int, *, num_workers: int, short: bool = False, features: bool = False
) -> LanguageModelConfig:
    """Return the small preset of a frozen base, with ρ given and no MLflow.

    Args:
        home: directory of the runs.
        base: directory of the frozen model.
        name: name of the run.
        num_steps: steps of the run.
        num_workers: workers of the run.
        short: whether to train on the validation text; the hidden states of the whole training text take 5 GiB.
        features: whether to train on stored hidden states.
    """
    small = frozen_small()
    data = small.data
    if short:
        data = dataclasses.replace(data, train=data.validation)
    return dataclasses.replace(
        small,
        data=data,
        run=dataclasses.replace(
            small.run, name=name, storage=str(home / "runs"), num_steps=num_steps, checkpoint_every=10 * num_steps
        ),
        model=dataclasses.replace(small.model, path=str(base), features=features),
        temperature=dataclasses.replace(small.temperature, rho=2.0),
        workers=dataclasses.replace(small.workers, num_workers=num_workers, precision="fp32"),
        tracking=dataclasses.replace(small.tracking, enabled=False),
    )


def at_point(config: LanguageModelConfig, rho: float, rate: float) -> LanguageModelConfig:
    """Return a run with another ρ and another learning rate of the TempNet."""
    return dataclasses.replace(
        config,
        temperature=dataclasses.replace(config.temperature, rho=rho),
        optimizer=dataclasses.replace(config.optimizer, learning_rate_tempnet=rate),
    )


def timed(plan: Plan) -> tuple[float, dict[str, Any]]:
    """Make a run and return its seconds and its outcome."""
    started = time.monotonic()
    outcome = train(plan, with_progress=False)
    return time.monotonic() - started, outcome


def largest_difference(
    ours: dict[str, float], theirs: dict[str, float], names: Collection[str] = ()
) -> tuple[float, str]:
    """Return the largest relative difference between scores of two validations, of all or of some, and its name."""
    differences = [
        (abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-3), name)
        for name in names or theirs
        if theirs[name] == theirs[name]
    ]
    return max(differences)


def describe_differences(ours: dict[str, float], theirs: dict[str, float]) -> str:
    """Describe the largest relative difference between the scores of two validations, and that between their losses."""
    worst, name = largest_difference(ours, theirs)
    losses, _ = largest_difference(ours, theirs, LOSSES)
    return f"scores differ by at most {worst:.1e} ({name}), losses and mean τ by {losses:.1e}"


def measure_grid(home: Path, num_steps: int, num_compared: int, *, hidden_size: int, num_layers: int) -> None:
    """Compare a grid of 16 with one of its runs: time, memory and scores."""
    base = home / "small"
    save_base(base, hidden_size=hidden_size, num_layers=num_layers)
    timed(
        make_plan(make_config(home, base, "warm-up", 2, num_workers=2))
    )  # prepares the text, and fills the file cache
    points = [(rho, rate) for rho in (2.0, 2.5, 3.0, 3.5) for rate in (3e-3, 6e-3, 1e-2, 2e-2)]
    singles = []
    for number in range(num_compared):
        rho, rate = points[number * 15 // max(1, num_compared - 1)]
        config = at_point(make_config(home, base, f"single-{number}", num_steps, num_workers=2), rho, rate)
        singles.append((rho, rate, *timed(make_plan(config))))
    sweep = LanguageModelSweep(
        base=make_config(home, base, "grid", num_steps, num_workers=2), sweep=SweepSection(axes=AXES)
    )
    started = time.monotonic()
    results = run_sweep(make_sweep(sweep))
    seconds = time.monotonic() - started
    assert not results.failed
    single = sum(seconds for _, _, seconds, _ in singles) / len(singles)
    grid = [(row, read_json(f"{sweep.run.directory}/{row.name}/outcome.json") or {}) for row in results.rows]
    peak = grid[0][1]["peak_memory_gib"]
    print(f"\none run {single:.1f} s; grid of 16 {seconds:.1f} s: {seconds / single:.2f} times (target: at most 2.0)")
    steps = [outcome["seconds_trained"] / num_steps for _, _, _, outcome in singles]
    of_grid = grid[0][1]["seconds_trained"] / num_steps
    print(f"a step of one run {1e3 * sum(steps) / len(steps):.0f} ms, of the grid {1e3 * of_grid:.0f} ms")
    alone = max(outcome["peak_memory_gib"] for *_, outcome in singles)
    print(f"peak memory of a worker {peak:.3f} and {alone:.3f} GiB: {peak / alone:.2f} times (target: at most 1.5)")
    for rho, rate, _, outcome in singles:
        (own,) = [
            found
            for row, found in grid
            if row.point == {"temperature.rho": rho, "optimizer.learning_rate_tempnet": rate}
        ]
        print(
            f"ρ {rho:g}, rate {rate:g}: {describe_differences(own['validation'], outcome['validation'])} (target: 1e-5)"
        )
    rho, rate, _, outcome = singles[0]
    config = make_config(home, base, "one-worker", num_steps, num_workers=1)
    config = at_point(config, rho, rate)
    _, alone = timed(make_plan(config))
    found = describe_differences(alone["validation"], outcome["validation"])
    print(f"ρ {rho:g}, rate {rate:g} with one worker, which only rounds differently: {found}")


def measure_features(home: Path, num_steps: int) -> None:
    """Compare training from stored features with training on a base of 6 layers and hidden size 384."""
    base = home / "six"
    save_base(base, hidden_size=384, num_layers=6)
    config = make_config(home, base, "from-base", num_steps, num_workers=1, short=True)
    (train_features, *_) = prepare_hidden_states(config)
    files = [file.stat().st_size for file in Path(train_features.directory).glob("features-*.arrow")]
    tokens = train_features.text.num_rows * train_features.context_length
    measured, predicted = sum(files) / tokens, train_features.bytes_per_token
    print(f"\nfeatures: {measured:.2f} bytes per token, predicted {predicted:.2f} ({measured / predicted - 1:+.3%})")
    _, of_base = timed(make_plan(config))
    short = make_config(home, base, "from-features", num_steps, num_workers=1, short=True, features=True)
    _, stored = timed(make_plan(short))
    ratio = stored["tokens_per_second"] / of_base["tokens_per_second"]
    print(
        f"{of_base['tokens_per_second']:,.0f} tokens/s on the base, {stored['tokens_per_second']:,.0f} from features: "
        f"{ratio:.1f} times (target: at least 5)"
    )
    print(f"{describe_differences(stored['validation'], of_base['validation'])}, by the rounding to bfloat16")


def main() -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=400, help="steps of every run of the grid")
    parser.add_argument("--num-compared", type=int, default=2, help="points of the grid that are also run alone")
    parser.add_argument("--hidden-size", type=int, default=192, help="hidden size of the base of the grid")
    parser.add_argument("--num-layers", type=int, default=4, help="layers of the base of the grid")
    parser.add_argument("--num-feature-steps", type=int, default=100, help="steps on the larger base")
    parser.add_argument("--parts", nargs="+", choices=("grid", "features"), default=("grid", "features"))
    arguments = parser.parse_args()
    start_ray()
    with tempfile.TemporaryDirectory(prefix="frozen-grid-") as name:
        if "grid" in arguments.parts:
            sizes = {"hidden_size": arguments.hidden_size, "num_layers": arguments.num_layers}
            measure_grid(Path(name), arguments.num_steps, arguments.num_compared, **sizes)
        if "features" in arguments.parts:
            measure_features(Path(name), arguments.num_feature_steps)


if __name__ == "__main__":
    main()
