"""The headroom test for rewards: what temperatures could gain of a verifier's reward, from texts at a grid of them.

Every prompt gets two halves of texts at every constant and every rule:

    constants       eleven from .05 to 1.5
    phases          one temperature before the middle of a text (half the mean length at τ = 1), another one after it
    by entropy      one temperature where the entropy at τ = 1 is below its mean, another one above it

A rule is chosen by the prompts of one half of the prompts and measured on those of the other, and the other way round. The
constant of a single prompt is chosen by one half of its texts and measured on the other half. Random streams are the same for
all temperatures, gains are taken prompt by prompt, and intervals are over prompts, of which there are P.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jobs.engine.cluster import start_ray
from jobs.engine.command_line import as_typed
from jobs.engine.fields import flatten, values_of
from jobs.engine.report import markdown_table
from jobs.engine.tracking import resolve_uri
from jobs.scoring.generation.sampling import TemperatureRule
from jobs.scoring.headroom.config import RewardHeadroom
from jobs.scoring.headroom.job import judge
from jobs.scoring.results import publish, write_results
from jobs.scoring.reward.config import RewardConfig, RewardedTexts, RewardTemperatureSection
from jobs.scoring.reward.job import RewardTrainer, describe_losses, points
from jobs.scoring.reward.plan import CONSTANTS, RewardPlan, make_plan
from jobs.scoring.reward.rollouts import RunOrders, Temperature, work_in_pool
from jobs.scoring.units import NoRewardError, UnitStore, absolute_output, check_pool, settings_digest
from jobs.scoring.verifiers.verifier import VerifierSection
from pipelines.storage import compute_digest
from tempnet.intervals import Interval, mean_interval

LEVELS = (0.2, 0.6, 1.0, 1.4)
"""Temperatures that the rules are made of."""
RESULTS_FILE, MEASURED_FILE = "headroom.json", "measured.json"
_FIRST_STEP = -4001
_KINDS: tuple[Literal["phases", "entropy"], ...] = ("phases", "entropy")

Rewards = dict[str, list[dict[int, float]]]
"""Name of a temperature → for each half of the texts, the mean reward of every prompt by its place."""


def measure_reward_headroom(config: RewardHeadroom) -> dict[str, Any]:
    """Run or continue the job, print its table and verdict, and return what headroom.json holds."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = plan_of(config)
    output, record = absolute_output(config.output), dict(plan.record)
    del record["prompts_per_step"]  # here it is the size of the pool, on which no result depends
    record |= {"texts_per_prompt": config.texts_per_prompt, "levels": list(LEVELS)}
    store = UnitStore(output)
    store.claim(record)
    started = time.monotonic()
    start_ray()
    check_pool(config.workers, reads=False)
    with work_in_pool(plan) as run_orders:
        measured = measure(plan, run_orders, store)
    values = conclude(measured["rewards"], measured, least_gain=config.least_gain / 100)
    said = table(values, config)
    publish(
        config,
        output,
        lambda directory: write_results(directory / RESULTS_FILE, values | {"settings": record}),
        uri=uri,
        name="headroom",
        digest=settings_digest(record | {"least_gain": config.least_gain}),
        metrics={f"{name}/gain": found["gain"]["mean"] for name, found in values["rows"].items() if found["gain"]},
        note=said,
        data_sets={"evaluation": ("prompts", compute_digest(record["questions_digest"]), config.prompts)},
    )
    print(f"\n{said}\n{time.monotonic() - started:.0f} s; ± 95 % over prompts\n{output}/{RESULTS_FILE}")
    return values


def training_config(config: RewardHeadroom) -> RewardConfig:
    """Return the configuration of training on rewards that has the same fields."""
    return RewardConfig(storage=config.storage, **values_of(config, RewardedTexts))


def plan_of(config: RewardHeadroom) -> RewardPlan:
    """Return the plan of the texts, which is that of training on rewards with nothing held out."""
    plan = make_plan(
        replace(
            training_config(config),
            held_out_share=0.0,
            num_steps=1,
            prompts_per_step=config.workers.num_workers * config.prompts_at_a_time,
            group_size=config.texts_per_prompt // 2,
            # No network is learned, and this one fits every model.
            temperature=RewardTemperatureSection(input="logits", hidden_size=1, num_prototypes=1),
        )
    )
    if len(plan.questions) < 4:
        raise ValueError(
            f"prompts = {config.prompts!r}: {len(plan.questions)} have room, and 4 are needed for two halves"
        )
    return replace(plan, records_entropy=True)


def measure(plan: RewardPlan, run_orders: RunOrders, store: UnitStore) -> dict[str, Any]:
    """Return the rewards of every temperature by prompt; what the store has is not measured again."""
    trainer = RewardTrainer(plan, run_orders)
    known = store.read_json(MEASURED_FILE) or {"rewards": {}}
    trainer.failures.update(known.get("failures", {}))
    trainer.first_failure = known.get("first_failure", "")
    found: Rewards = {
        name: [{int(place): reward for place, reward in half.items()} for half in halves]
        for name, halves in known["rewards"].items()
    }
    places = [(place, 0) for place in range(len(plan.questions))]

    def take(name: str, temperature: Temperature) -> None:
        if name not in found:
            answers = [trainer.ask(temperature, places, _FIRST_STEP - half) for half in (0, 1)]
            found[name] = [answer.by_prompt(trainer.measure) for answer in answers]
            if name == "1":
                known["mean_tokens"] = sum(one.mean("tokens") for one in answers) / 2
                known["mean_entropy"] = sum(one.total("entropy") for one in answers) / sum(
                    one.total("tokens") for one in answers
                )
            known.update(failures=dict(trainer.failures), first_failure=trainer.first_failure)
            store.write({MEASURED_FILE: known | {"rewards": found}})
            mean = sum(map(sum, (half.values() for half in found[name]))) / sum(map(len, found[name]))
            print(f"{len(found):>3}/{len(CONSTANTS) + 2 * len(LEVELS) * (len(LEVELS) - 1)}  τ = {name}: {mean:.4f}")

    for constant in CONSTANTS:  # the first is 1, at which lengths and entropies are measured
        take(f"{constant:g}", constant)
    bounds = {"phases": known["mean_tokens"] / 2, "entropy": known["mean_entropy"]}
    for kind in _KINDS:
        for first, second in itertools.permutations(LEVELS, 2):
            rule = TemperatureRule(kind=kind, values=(first, second), bound=bounds[kind])
            take(f"{kind} {first:g} {second:g}", rule)
    return known | {"rewards": found, "measure": trainer.measure}


def conclude(rewards: Rewards, measured: Mapping[str, Any], *, least_gain: float) -> dict[str, Any]:
    """Return the gains of all kinds of temperatures with intervals, and the verdict; fewer than 4 prompts: NoRewardError.

    `measured` holds lengths, entropies and what else is known of the texts; `least_gain` is worth a TempNet. Only prompts
    count that have a reward at every temperature, in both halves: losses must not make one temperature's prompts easier.
    """
    places = sorted(set.intersection(*(set(half) for halves in rewards.values() for half in halves)))
    if len(places) < 4:
        raise NoRewardError(
            f"{len(places)} prompts have rewards at all temperatures, and 4 are needed for two halves; "
            + describe_losses(measured)
        )
    found = {name: np.array([[half[place] for place in places] for half in halves]) for name, halves in rewards.items()}
    constants = [name for name in found if " " not in name]
    rows: dict[str, Any] = {}

    def add(name: str, own: np.ndarray, other: np.ndarray | None, chosen: str) -> None:
        gain = None if other is None else mean_interval(own - other)
        rows[name] = {"reward": float(own.mean()), "gain": gain and gain._asdict(), "chosen": chosen}

    best, best_name = cross_fitted(found, constants)
    one = found["1"].mean(0)
    add("one", one, None, "1")
    add("constant", best, one, best_name)
    # A family holds the constants, too, so that it is never worse than they are but by chance.
    for kind in _KINDS:
        own, chosen = cross_fitted(found, constants + [name for name in found if name.startswith(kind)])
        add(kind, own, best, chosen)
    own, chosen = cross_fitted(found, list(found))
    add("token", own, best, chosen)
    add("prompt", per_prompt(found, constants), best, "")
    verdict = judge([Interval(**rows[name]["gain"]) for name in ("token", "prompt")], least_gain)
    facts = {name: value for name, value in measured.items() if name != "rewards"}
    return {"rows": rows, "verdict": verdict, "num_prompts": len(places), **facts}


def cross_fitted(rewards: Mapping[str, np.ndarray], names: Sequence[str]) -> tuple[np.ndarray, str]:
    """Return the rewards (P,) at the temperature that is best for the other half of the prompts, and both names."""
    whole = {name: rewards[name].mean(0) for name in names}
    own, chosen = np.empty_like(whole[names[0]]), []
    for half in (0, 1):
        best = max(names, key=lambda name: float(whole[name][1 - half :: 2].mean()))
        chosen.append(best)
        own[half::2] = whole[best][half::2]
    return own, " or ".join(dict.fromkeys(chosen))


def per_prompt(rewards: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Return the rewards (P,) at the constant that is best for the other half of each prompt's own texts, and of equally good
    ones for those halves of all prompts.
    """
    every = np.stack([rewards[name] for name in names])  # (constants, halves, P)
    halves = []
    for half in (0, 1):
        ranked = every[np.argsort(-every[:, 1 - half].sum(1), kind="stable")]
        best = ranked[:, 1 - half].argmax(0)
        halves.append(ranked[best, half, np.arange(len(best))])
    return np.mean(halves, axis=0)


def table(values: Mapping[str, Any], config: RewardHeadroom) -> str:
    """Return the table, the verdict and the command that realises it."""
    rows, middle, bound = values["rows"], values["mean_tokens"] / 2, values["mean_entropy"]
    titles = {
        "one": "1",
        "constant": "best constant",
        "phases": f"two phases, before and from token {middle:.0f} on",
        "entropy": f"by entropy, below and above {bound:.2f} nats",
        "token": "the best of these rules",
        "prompt": "a constant for each prompt",
    }
    lines = [["temperature", "chosen", values["measure"], "gain, points", "over"]]
    for name, title in titles.items():
        found, over = rows[name], {"one": "", "constant": "1"}.get(name, "best constant")
        gain = points(found["gain"]) if found["gain"] else ""
        lines.append([title, found["chosen"], f"{found['reward']:.4f}", gain, over])
    token, prompt, constant = (points(rows[name]["gain"]) for name in ("token", "prompt", "constant"))
    verdict = (
        f"{values['verdict']}: a rule for tokens gains {token} points over the best constant, a constant for each prompt "
        f"{prompt}; the best constant gains {constant} over τ = 1"
    )
    losses = f"{describe_losses(values)}\n" if values["failures"] else ""
    return (
        f"{markdown_table(lines)}\n\n{verdict}\n{values['num_prompts']} prompts of {config.texts_per_prompt} texts at each "
        f"temperature; a rule is two numbers, and a network may find more\n{losses}to learn it: {training_command(config)}"
    )


def training_command(config: RewardHeadroom) -> str:
    """Return the command that trains on the same rewards, with the options that are not its defaults."""
    plain = flatten(RewardConfig(model="", prompts="", verifier=VerifierSection(name="none")))
    words = ["jobs.train_reward"]
    for name, value in flatten(training_config(config)).items():
        if value != plain[name]:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return as_typed(words)
