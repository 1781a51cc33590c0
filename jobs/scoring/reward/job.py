"""Training on rewards: constants, steps with a checkpoint now and then, the choice of a goal, the verdict, export and MLflow.

    constants   some are tried on the training prompts. Of those that cannot be told apart from the best, the one nearest to
                1, whose texts vary most, is where the network starts and what the divergence is measured from, so that
                it is spent on differences between tokens, and not on a level that a constant has, too
    steps       the goal of the divergence rises from 0 to the largest that is tried; λ follows it
    choice      the weights at several goals are compared on new texts of the training prompts, and the best are kept
    verdict     the learned temperatures are compared with their rivals, with intervals over prompts:

        learned      the temperatures of the TempNet
        mean_shift   the constant that equals their mean over texts of the training prompts
        shuffled     the same temperatures, each given to a token at random
        constant     the best constant, chosen by the reward that was learned from, on texts of the training prompts
        one          τ = 1

All rivals are measured on the same prompts and random streams, which no step of the training and no choice has seen. What a
text earns depends on its prompt first of all, so the differences are taken prompt by prompt.

Everything random is drawn by the workers from keys, so that a run that goes on from a checkpoint is the run that was never
stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import AutoConfig

from jobs.engine.cluster import check_machine, start_ray
from jobs.engine.console import clock
from jobs.engine.export import open_export
from jobs.engine.fields import differences, flatten
from jobs.engine.launch import check_writable
from jobs.engine.masking import masked
from jobs.engine.metrics import MetricLogger, survive_outage
from jobs.engine.report import markdown_table
from jobs.engine.tracking import finish_run, mark_if_ended, open_run, resolve_uri, run_tags
from jobs.scoring.generation.sampling import TemperatureRule
from jobs.scoring.reward.config import RewardConfig
from jobs.scoring.reward.plan import CONSTANTS, ROUNDS, RewardPlan, describe_plan, make_network, make_plan, start_at
from jobs.scoring.reward.rollouts import Answer, Order, RunOrders, Temperature, gain, work_in_pool
from jobs.scoring.units import NoRewardError, check_pool
from pipelines.local_copy import local_copy
from pipelines.storage import compute_digest, create_directory, exists, read_bytes, read_json, write_bytes, write_json
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference, base_digest, find_base, read_reference
from tempnet.controllers import KLController, divergence_of_success
from tempnet.intervals import Interval
from tempnet.network import PAIRED_DIRECTORY, TempNet, model_card

Figures = dict[str, float]

CHECKPOINT_FILE, CONFIGURATION_FILE, OUTCOME_FILE = "checkpoint.safetensors", "configuration.json", "outcome.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_DECAY_SHARE = 0.2  # of the steps, at the end: the learning rate falls to 0. Before, the goal rises
_BETAS = (0.9, 0.98)  # of AdamW: a step's gradient is so noisy that its square is best averaged over tens of steps
# First numbers of the steps whose texts nothing learns from; each goes down from there.
_FIRST_CONSTANT, _FIRST_CHOICE, _STEP_OF_VERDICT = -1001, -2001, -3001
_MOST_TAUS = 4096
_NUM_LAST = 10  # steps whose mean figures stand for the end of the training
_STATE = ("step", "best_constant", "reference", "history", "first_failure")  # what a checkpoint holds as it is


class RewardTrainer:
    def __init__(self, plan: RewardPlan, run_orders: RunOrders) -> None:
        self.plan = plan
        self.network: TempNet = make_network(plan)
        self.step = 0
        self.history: list[Figures] = []
        self.constants: dict[float, Figures] = {}
        """Constant → its figures on training prompts, for all that were tried; empty before they are."""
        self.best_constant = self.reference = 1.0
        """The constant with the most reward, and the one that the divergence is measured from."""
        self.passed: dict[int, dict[str, Tensor]] = {}
        """Step → weights at the goals that were reached; 0: those of the best constant."""
        self.failures: Counter[str] = Counter()
        """Number of texts lost to the verifier, by reason."""
        self.first_failure = ""
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=plan.config.learning_rate, betas=_BETAS, weight_decay=0.0
        )
        leash = plan.config.leash
        self.controller = KLController(
            leash.weight,
            target=leash.target_kl or 1.0,  # what is not given is known after the constants
            gain=leash.gain,
            reset_steps=leash.reset_steps or 1.0,
            ramp_steps=(1.0 - _DECAY_SHARE) * plan.config.num_steps,
        )
        self._run_orders = run_orders

    def begin(self) -> None:
        """Try constants on the training prompts, and set the start of the network, the reference and the largest goal."""
        found = self.choose({constant: constant for constant in CONSTANTS}, _FIRST_CONSTANT)
        self.constants = {constant: answer.figures() for constant, answer in found.items()}
        self.best_constant, best = next(iter(found.items()))
        equal = [
            tau for tau, answer in found.items() if not gain(best, answer, self.measure).low > 0.0 or answer is best
        ]
        self.reference = min(equal, key=lambda tau: abs(math.log(tau)))
        config, reward = self.plan.config, self.constants[self.reference]["reward"]
        if config.leash.target_kl is None:
            try:
                self.controller.target = config.leash.allowance * divergence_of_success(reward)
            except ValueError:
                raise ValueError(
                    f"the mean reward of {config.model} at τ = {self.reference:g}, its best constant, is {reward:g}, over "
                    f"{self.constants[self.reference]['texts']:.0f} texts: no goal of the divergence follows from it. A "
                    "model that is never right has nothing to learn from, one that always is has nothing to learn; else give "
                    "--leash.target-kl"
                ) from None
        self.passed = {0: self.weights()}
        if not config.temperature.path:
            self.passed = {0: start_at(self.network, self.best_constant)}
            start_at(self.network, self.reference)

    def choose(self, candidates: Mapping[Any, Temperature], first: int) -> dict[Any, Answer]:
        """Return what was measured of temperatures on training prompts, the best first; the leading ones get more texts."""
        whole: dict[Any, Answer] = {name: Answer() for name in candidates}
        ranked, num_before = list(candidates), 0
        for num_left, num_batches in ROUNDS:
            ranked = ranked[:num_left]
            for name in ranked:
                for number in range(num_before, num_before + num_batches):
                    whole[name].add(
                        self.ask(candidates[name], self.plan.places_of_step(first - number), first - number)
                    )
            num_before += num_batches
            ranked.sort(key=lambda name: -whole[name].mean(self.measure))  # stable
            ranked += [name for name in whole if name not in ranked]
        return {name: whole[name] for name in ranked}

    @property
    def measure(self) -> str:
        """What is learned from: `reward`, or `distinct` reward."""
        return "distinct" if self.plan.config.reward == "distinct" else "reward"

    def train_step(self) -> Figures:
        config, weight = self.plan.config, self.controller.weight
        answer = self.ask(self.weights(), self.plan.places_of_step(self.step), self.step, weight)
        num_texts = answer.total("texts")
        for name, parameter in self.network.named_parameters():
            parameter.grad = answer.gradient[name] / num_texts
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (1.0 - self.step / config.num_steps) / _DECAY_SHARE)
        self.optimizer.step()
        figures = answer.figures() | {"kl_weight": weight, "gradient_norm": norm.item()}
        if config.leash.reset_steps:
            self.controller.update(figures["kl"])
        self.step += 1
        self.history.append(figures)
        if self.step in self.plan.goal_steps:
            self.passed[self.step] = self.weights()
        return figures

    def finish(self) -> dict[int, Answer]:
        """Give the network the weights of the goal whose texts are best, and return what was measured, the best first."""
        found = self.choose(self.passed, _FIRST_CHOICE)
        self.network.load_state_dict(self.passed[next(iter(found))])
        return found

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.network.state_dict().items()}

    def result(self) -> dict[str, Any]:
        """Return what the run has come to: constants, the last steps' mean figures, λ and the largest goal, and losses."""
        last = self.history[-_NUM_LAST:]
        means = {name: sum(step[name] for step in last) / len(last) for name in last[0]} if last else {}
        return {
            "num_steps": self.step,
            "base": self.constants[1.0],
            "constants": {f"{constant:g}": figures for constant, figures in self.constants.items()},
            "best_constant": self.best_constant,
            "reference": self.reference,
            "last_steps": means,
            "target_kl": self.controller.target,
            "kl_weight": self.controller.weight,
            "failures": dict(self.failures),
            "first_failure": self.first_failure,
        }

    def save(self, directory: str) -> None:
        """Write the state: the network, its weights at the goals, Adam's moments, and as JSON in the header the rest."""
        tensors = {f"network.{name}": value for name, value in self.weights().items()}
        for name, parameter in self.network.named_parameters():
            moments = self.optimizer.state[parameter]
            tensors |= {f"{key}.{name}": moments.get(key, torch.zeros_like(parameter)) for key in _MOMENTS}
        for step, weights in self.passed.items():
            tensors |= {f"passed.{step}.{name}": value for name, value in weights.items()}
        state = {name: getattr(self, name) for name in _STATE} | {
            "controller": self.controller.state(),
            "constants": list(self.constants.items()),
            "failures": dict(self.failures),
        }
        whole = {name: value.detach().contiguous() for name, value in tensors.items()}
        write_bytes(f"{directory}/{CHECKPOINT_FILE}", save(whole, metadata={"state": json.dumps(state)}))

    def load(self, directory: str) -> bool:
        """Take the state of the checkpoint in a directory, and return whether there is one."""
        uri = f"{directory}/{CHECKPOINT_FILE}"
        if not exists(uri):
            return False
        content = read_bytes(uri)

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        try:
            tensors = load(content)
            # A safetensors file begins with the length of its JSON header in 8 bytes.
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            state = json.loads(header["__metadata__"]["state"])
            self.network.load_state_dict(part("network."))
            for name, parameter in self.network.named_parameters():
                moments = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(state["step"])), **moments}
            steps = [step for step in (0, *self.plan.goal_steps) if step <= state["step"]]
            self.passed = {step: part(f"passed.{step}.") for step in steps}
            self.controller.restore(state["controller"])
            self.constants = dict(state["constants"])
            for name in _STATE:
                setattr(self, name, state[name])
            self.failures = Counter(state["failures"])
        except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"{uri} is damaged or of another version: {error!s:.200}; delete it to begin anew"
            ) from error
        return True

    def ask(
        self, temperature: Temperature, places: Sequence[tuple[int, int]], step: int, kl_weight: float | None = None
    ) -> Answer:
        """Return the sum of the answers to questions, added in their order."""
        size = self.plan.config.prompts_at_a_time
        order = Order(step=step, places=(), temperature=temperature, kl_weight=kl_weight, reference=self.reference)
        parts = [tuple(places[start : start + size]) for start in range(0, len(places), size)]
        whole = Answer()
        for answer in self._run_orders([replace(order, places=part) for part in parts]):
            whole.add(answer)
        self.failures.update(whole.failures)
        self.first_failure = self.first_failure or whole.first_failure
        if not whole.groups:
            raise NoRewardError(
                f"verifier.name = {self.plan.config.verifier.name} gave no text of a step a reward, "
                f"{sum(whole.failures.values())} were lost: {whole.first_failure}"
            )
        return whole


def describe_run(config: RewardConfig) -> str:
    """Return the plan of the job in words, and start nothing."""
    return describe_plan(*check_start(config))


def check_start(config: RewardConfig) -> tuple[RewardPlan, str]:
    """Return the plan and the address of MLflow after all that can be checked before Ray starts.

    That is also that the run was not begun with other settings, and that its directory can be written.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    directory = plan.config.run.directory
    known = read_json(f"{directory}/{CONFIGURATION_FILE}")
    if known and (changes := differences(known, plan.record)):
        raise ValueError(
            f"name = {config.name!r} was begun with other settings: {'; '.join(changes[:5])}; choose another name, or delete "
            f"{directory}"
        )
    check_writable("storage", directory)
    check_machine()
    return plan, uri


def train_reward(config: RewardConfig) -> dict[str, Any]:
    """Run or continue the job, and return the outcome."""
    plan, uri = check_start(config)
    config = plan.config
    directory, started = config.run.directory, time.monotonic()
    create_directory(directory)
    write_json(f"{directory}/{CONFIGURATION_FILE}", plan.record)
    start_ray()
    check_pool(config.workers, reads=False)
    with ExitStack() as stack:
        tracked = logger = None
        if uri:
            tracked = open_run(
                uri=uri,
                experiment=config.tracking.experiment,
                name=config.name,
                directory=directory,
                parameters=flatten(config),
                tags=run_tags(config, config.tracking),
                data_sets={"training": ("prompts", compute_digest(plan.record["questions_digest"]), config.prompts)},
            )
            logger = MetricLogger(tracked, warn=print)
        stack.enter_context(mark_if_ended(tracked))
        trainer = RewardTrainer(plan, stack.enter_context(work_in_pool(plan)))
        train(trainer, directory, log=logger.log if logger else None)
        outcome = trainer.result() | compare_temperatures(trainer)
        if logger:
            logger.close()
        outcome |= {
            "directory": directory,
            "export": f"{directory}/export",
            "num_too_long": plan.num_too_long,
            "tracking_uri": masked(uri),
            "mlflow_run_id": tracked.run_id if tracked else None,
            "mlflow_experiment_id": tracked.experiment_id if tracked else None,
        }
        export(trainer, outcome)
        write_json(f"{directory}/{OUTCOME_FILE}", outcome | {"history": trainer.history})
        if tracked:
            with survive_outage("the end of the run"):
                note = f"```\n{table(outcome)}\n```"
                finish_run(tracked, status="FINISHED", artifacts=None, metrics=_final_metrics(outcome), note=note)
    print(f"\n{table(outcome)}\n{trainer.step} steps, {clock(time.monotonic() - started)}")
    return outcome


def train(
    trainer: RewardTrainer,
    directory: str,
    *,
    say: Callable[[str], None] = print,
    log: Callable[[Figures, int], None] | None = None,
) -> None:
    """Make the steps that are left, from the checkpoint in a directory if there is one, and write checkpoints there.

    `log` is called with the figures of every step, and its number from 1.
    """
    config = trainer.plan.config
    create_directory(directory)
    if trainer.load(directory):
        say(f"continues after step {trainer.step} of {config.num_steps}")
    else:
        trainer.begin()
        best = trainer.constants[trainer.best_constant]
        say(
            f"best constant τ = {trainer.best_constant:g}: reward {best['reward']:.4f}, distinct {best['distinct']:.4f}, "
            f"over {best['texts']:.0f} texts; the divergence from τ = {trainer.reference:g} rises to "
            f"{trainer.controller.target:.3f} nats a text"
        )
        trainer.save(directory)
    started, first = time.monotonic(), trainer.step
    while trainer.step < config.num_steps:
        figures = trainer.train_step()
        if log is not None:
            log(figures, trainer.step)
        left = (time.monotonic() - started) / (trainer.step - first) * (config.num_steps - trainer.step)
        lost = f"  LOST {figures['lost']:.0f}" if figures["lost"] else ""
        say(
            f"{trainer.step:>{len(str(config.num_steps))}}/{config.num_steps}  reward {figures['reward']:.3f}  "
            f"distinct {figures['distinct']:.3f}  KL {figures['kl']:.3f}  λ {figures['kl_weight']:.3g}  "
            f"τ {figures['tau_mean']:.3f} ± {figures['tau_deviation']:.3f}{lost}  {clock(left)} left"
        )
        if trainer.step % config.checkpoint_every == 0 or trainer.step == config.num_steps:
            trainer.save(directory)


def compare_temperatures(trainer: RewardTrainer) -> dict[str, Any]:
    """Choose the goal whose weights are best, compare them with their rivals, and return figures, gains and the verdict."""
    goals = trainer.finish()
    best, learned = next(iter(goals.items()))
    taus = [tau for group in learned.groups for tau in group.taus]
    temperatures: dict[str, Temperature] = {
        "learned": trainer.weights(),
        "mean_shift": learned.figures()["tau_mean"],
        "shuffled": TemperatureRule(kind="shuffled", values=tuple(taus[:: len(taus) // _MOST_TAUS + 1])),
        "constant": trainer.best_constant,
        "one": 1.0,
    }
    places = trainer.plan.places_of_verdict()
    answers = {name: trainer.ask(temperature, places, _STEP_OF_VERDICT) for name, temperature in temperatures.items()}
    gains = {
        name: gain(answers["learned"], answers[name], trainer.measure) for name in temperatures if name != "learned"
    }
    return {
        "temperatures": {name: answer.figures() for name, answer in answers.items()},
        "gains": {name: interval.as_json() for name, interval in gains.items()},
        "goals": {str(step): answer.figures() for step, answer in goals.items()},
        "best_goal": best,
        "prompts": "held-out" if trainer.plan.held_out else "training",
        "num_prompts": len(answers["learned"].by_prompt(trainer.measure)),
        "measure": trainer.measure,
        "verdict": verdict(gains["constant"], is_start=best == 0 and not trainer.plan.config.temperature.path),
    }


def verdict(over_constant: Interval, *, is_start: bool = False) -> str:
    """Judge a gain over the best constant; `is_start`: on the training prompts nothing that was learned is better than it."""
    if is_start or over_constant.high <= 0.0:
        return "not better"
    return "better" if over_constant.low > 0.0 else "cannot be told"


def table(outcome: dict[str, Any]) -> str:
    names = {
        "learned": "learned",
        "mean_shift": f"their mean, {outcome['temperatures']['mean_shift']['tau_mean']:.3f} (MeanShift)",
        "shuffled": "learned, shuffled",
        "constant": f"best constant, {outcome['best_constant']:g}",
        "one": "1",
    }
    rows = [["temperature", "reward", "distinct", "KL", "less than learned, points"]]
    for name, shown in names.items():
        figures, behind = outcome["temperatures"][name], outcome["gains"].get(name)
        values = [f"{figures[key]:.{digits}f}" for key, digits in (("reward", 4), ("distinct", 4), ("kl", 3))]
        rows.append([shown, *values, points(behind) if behind else ""])
    of = {"reward": "reward", "distinct": "distinct reward"}[outcome["measure"]]
    each = outcome["temperatures"]["learned"]["texts"] / outcome["num_prompts"]
    where = f"{outcome['num_prompts']} {outcome['prompts']} prompts of {each:.0f} texts each"
    goal = outcome["goals"][str(outcome["best_goal"])]
    leash = "no divergence that was tried earned more on the training prompts than the start"
    if outcome["best_goal"]:
        leash = (
            f"the weights after step {outcome['best_goal']} of {outcome['num_steps']}, {goal['kl']:.3f} nats a text from "
            f"τ = {outcome['reference']:g}, earned most on the training prompts"
        )
    lines = [
        markdown_table(rows),
        "",
        f"{outcome['verdict']}: {points(outcome['gains']['constant'])} points of {of} over the best constant, "
        f"over {where}",
        f"leash: {leash}",
    ]
    if outcome["failures"]:
        lines.append(describe_losses(outcome))
    if outcome.get("num_too_long"):
        lines.append(f"LEFT OUT {outcome['num_too_long']} prompts that are too long for the model's context")
    return "\n".join(lines)


def describe_losses(outcome: Mapping[str, Any]) -> str:
    failures = outcome["failures"]
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(failures.items()))
    return f"LOST {sum(failures.values())} texts to the verifier: {reasons}; the first: {outcome['first_failure']}"


def points(interval: dict[str, float | None]) -> str:
    """Return an interval of a reward in hundredths."""
    mean, half_width = interval["mean"], interval["half_width"]
    assert mean is not None
    return f"{100 * mean:.1f} ± {100 * half_width:.1f}" if half_width is not None else f"{100 * mean:.1f} (one prompt)"


def export(trainer: RewardTrainer, outcome: Mapping[str, Any]) -> None:
    """Write what `jobs.generate --model` reads: configuration and tokenizer of the base, where it is, and the TempNet.

    The model card has the verdict of :func:`compare_temperatures`.
    """
    config, gains, place = trainer.plan.config, outcome["gains"], "/".join(outcome["export"].split("/")[-3:])
    base = local_copy(config.model)
    if reference := read_reference(base):  # the model is an export that refers to its own base
        find_base(base, fetch=local_copy)  # raises ValueError if another model is there now
    else:
        reference = BaseReference(path=config.model, digest=base_digest(base))
    learned = (
        f"{outcome['verdict']}: {points(gains['constant'])} points over the best constant, {points(gains['mean_shift'])} "
        f"over MeanShift, on {outcome['num_prompts']} {outcome['prompts']} prompts"
    )
    facts = [
        ("base model", config.model),
        ("training prompts", config.prompts),
        ("verifier, reward", f"{config.verifier.name}, {config.reward}"),
        ("learned τ", learned),
    ]
    with open_export(outcome["export"]) as directory:
        AutoConfig.from_pretrained(base, trust_remote_code=config.trust_remote_code).save_pretrained(directory)
        load_tokenizer(config.model).save_pretrained(directory)
        reference.save(directory)
        trainer.network.save_pretrained(directory / PAIRED_DIRECTORY)
        card = model_card({PAIRED_DIRECTORY: trainer.network}, place, "", masked(facts))
        (directory / "README.md").write_text(card, encoding="utf-8")


def _final_metrics(outcome: dict[str, Any]) -> dict[str, float]:
    metrics = {"target_kl": outcome["target_kl"], "lost_total": float(sum(outcome["failures"].values()))}
    for name, figures in outcome["temperatures"].items():
        metrics |= {f"{name}/{key}": figures[key] for key in ("reward", "distinct", "kl", "tau_mean")}
    for name, interval in outcome["gains"].items():
        metrics |= {f"{name}/gain": interval["mean"], f"{name}/gain_half_width": interval["half_width"] or math.nan}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
