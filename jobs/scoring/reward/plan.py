"""The plan of a run, completed and checked before Ray is started or the model is loaded, and in words (`--dry-run`)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from jobs.engine.export import model_digest, tempnet_digest
from jobs.engine.fields import recorded_values, with_absolute_paths
from jobs.engine.hardware import PROCESS_BYTES, describe_memory
from jobs.engine.masking import masked
from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.formats import FORMATS, Prompt, read_prompts
from jobs.scoring.generation.job import is_chat, prompt_text, room_for_prompts
from jobs.scoring.reward.config import RewardConfig
from jobs.scoring.verifiers.verifier import Panel
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import read_config
from tempnet.loading import load_tempnet
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig

NUM_TOKENS_AT_A_TIME = 512
"""Tokens whose logits a worker holds at a time: for V = 50 000, 100 MB in float32 for each of the few copies."""
CONSTANTS = (1.0, 0.85, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 1.2, 1.5)
ROUNDS = ((len(CONSTANTS), 1), (5, 2), (2, 5))
"""Rounds of a choice: how many temperatures are left in it, and how many steps' worth of texts each of them gets."""
_NUM_COMPARED = 5  # temperatures that the verdict compares
_NUM_TEXTS_OF_VERDICT, _MAX_GROUPS_OF_VERDICT = 1024, 8
_GOAL_SHARES = (0.28, 0.4, 0.57)  # of the steps; the goal of the divergence is then 1/8, 1/4 and 1/2 of the largest
_LEAST_SHARE_OF_START = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt as the model reads it: in the chat template if there is one, and as tokens."""

    prompt: Prompt
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """A checked configuration, with what follows from it; it is sent to the workers."""

    config: RewardConfig
    questions: tuple[Question, ...]
    """The prompts that leave room for `max_new_tokens` in the model's context."""
    held_out: tuple[Question, ...]
    """The prompts that nothing is learned from; the verdict is about them. If empty: about the training prompts."""
    num_too_long: int
    """Number of prompts, of both kinds, that are left out because they leave no room."""
    network: TempNetConfig
    stop: tuple[str, ...]
    record: dict[str, Any]
    """Everything that decides the result, as plain values: the fields, and digests of the model and the prompts."""
    records_entropy: bool = False
    """Whether the entropies of the tokens are measured."""

    @property
    def asked(self) -> tuple[Question, ...]:
        """All prompts: those that are learned from, then the held-out ones."""
        return (*self.questions, *self.held_out)

    @property
    def generation(self) -> GenerateConfig:
        """What the sampler reads of a configuration of `jobs.generate`."""
        config = self.config
        return GenerateConfig(
            model=config.model,
            prompts=config.prompts,
            output="unused",
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            dtype=config.dtype,
            device="cuda" if config.workers.use_gpu else "cpu",
            trust_remote_code=config.trust_remote_code,
            entropy=self.records_entropy,
        )

    def places_of_step(self, step: int) -> list[tuple[int, int]]:
        """Return the places of the questions that a step asks, each with the number of its first sample.

        Their order is shuffled anew for every pass over them. A question that comes twice has other samples.
        """
        size, number = len(self.questions), self.config.prompts_per_step
        places = []
        for position in range(step * number, (step + 1) * number):
            order = list(range(size))
            random.Random(f"{self.config.seed}/order/{position // size}").shuffle(order)
            places.append(order[position % size])
        return [(place, places[:slot].count(place) * self.config.group_size) for slot, place in enumerate(places)]

    def places_of_verdict(self) -> list[tuple[int, int]]:
        """Return the same of the verdict: as many groups of each question as give about `_NUM_TEXTS_OF_VERDICT` texts."""
        size = self.config.group_size
        places = range(len(self.questions), len(self.asked)) if self.held_out else range(len(self.questions))
        num_groups = min(_MAX_GROUPS_OF_VERDICT, -(-_NUM_TEXTS_OF_VERDICT // (len(places) * size)))
        return [(place, number * size) for number in range(num_groups) for place in places]

    @property
    def goal_steps(self) -> tuple[int, ...]:
        """The steps after which the weights are kept, the last one among them."""
        number = self.config.num_steps
        return tuple(sorted({*(max(1, round(share * number)) for share in _GOAL_SHARES), number}))


def make_plan(config: RewardConfig) -> RewardPlan:
    """Check a configuration against the model, the prompts, the verifier and the TempNet to start from."""
    config = with_absolute_paths(config)
    config = dataclasses.replace(config, storage=config.run.resolved_storage)
    prompts, held_out = _hold_out(config, read_prompts(config.prompts, config.format, config.limit))
    with naming_field("model = "):
        place = local_copy(config.model, with_weights=False)
        base = read_config(place, trust_remote_code=config.trust_remote_code).get_text_config()
    with naming_field("model: "):
        tokenizer = load_tokenizer(config.model)
    chat = is_chat(config.chat, tokenizer, config.model)
    fitting = _fitting("prompts", config, prompts, tokenizer, chat)
    field = "held_out_prompts" if config.held_out_prompts else "prompts"
    measured = _fitting(field, config, held_out, tokenizer, chat) if held_out else ()
    plan = RewardPlan(
        config=config,
        questions=fitting,
        held_out=measured,
        num_too_long=len(prompts) + len(held_out) - len(fitting) - len(measured),
        network=config.temperature.network_config(len(tokenizer), base.hidden_size),
        stop=() if chat else FORMATS[config.format].stop,
        record={
            **recorded_values(config),
            "model_digest": model_digest(config.model, trust_remote_code=config.trust_remote_code),
            "tempnet_digest": "",
            "questions_digest": _questions_digest(fitting),
            "held_out_digest": _questions_digest(measured) if measured else "",
        },
    )
    if config.temperature.path:
        plan.record["tempnet_digest"] = tempnet_digest(make_network(plan))
    with closing(Panel(config.verifier)) as panel:
        asked = ((question.prompt.id, question.prompt.fields) for question in plan.asked)
        plan.record["verifier_digest"] = panel.check(asked)
    return plan


def _hold_out(config: RewardConfig, prompts: list[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to learn from and those that are held out, of which none is learned from."""
    if not config.held_out_prompts:
        texts = list(dict.fromkeys(prompt.turns for prompt in prompts))  # one that comes twice is on one side
        number = int(config.held_out_share * len(texts))
        random.Random(f"{config.seed}/held-out").shuffle(texts)
        chosen = set(texts[:number] if number > 1 else [])
        held_out = [prompt for prompt in prompts if prompt.turns in chosen]
        return [prompt for prompt in prompts if prompt.turns not in chosen], held_out
    held_out = read_prompts(config.held_out_prompts, config.format, field="held_out_prompts")
    known = {prompt.turns for prompt in prompts}
    if shared := [prompt for prompt in held_out if prompt.turns in known]:
        raise ValueError(
            f"held_out_prompts = {config.held_out_prompts!r}: {len(shared)} of its prompts are in prompts = "
            f"{config.prompts!r} too, the first with the id {shared[0].id!r}"
        )
    return prompts, held_out


def _fitting(
    field: str, config: RewardConfig, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast, chat: bool
) -> tuple[Question, ...]:
    """Return the questions that leave room for the new tokens; the field is that of their file."""
    room = room_for_prompts(config.model, config.max_new_tokens, trust_remote_code=config.trust_remote_code)
    asked = [(prompt, *prompt_text(prompt.turns, [], tokenizer, chat)) for prompt in prompts]
    questions = [Question(prompt=prompt, text=text, ids=tuple(ids)) for prompt, text, ids in asked]
    fitting = tuple(question for question in questions if room is None or len(question.ids) <= room)
    if not fitting:
        raise ValueError(
            f"{field} = {getattr(config, field)!r}: the shortest has {min(len(question.ids) for question in questions)} "
            f"tokens, and the context of {config.model} leaves room for {room} beside max_new_tokens = "
            f"{config.max_new_tokens}"
        )
    return fitting


def _questions_digest(questions: tuple[Question, ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for question in questions:
        content = [question.prompt.id, question.text, dict(question.prompt.fields)]
        digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()


def make_network(plan: RewardPlan) -> TempNet:
    path = plan.config.temperature.path
    if not path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.config.seed)
            return TempNet(plan.network).eval()
    with naming_field("temperature.path = "):
        network = load_tempnet(local_copy(path))
    have, wanted = (dataclasses.asdict(one) for one in (network.config, plan.network))
    # ρ has no part in the reward, and τ_max_eval none in training; the TempNet keeps its own ρ, which scales its pooling.
    if other := [name for name in wanted if name not in ("rho", "tau_max_eval") and have[name] != wanted[name]]:
        shown = ", ".join(f"{name} = {have[name]!r} and not {wanted[name]!r}" for name in other)
        raise ValueError(
            f"temperature.path = {path!r} holds a TempNet with {shown}: set the temperature section to match"
        )
    network.set_tau_max_eval(None)
    return network


def start_at(network: TempNet, tau: float) -> dict[str, Tensor]:
    """Let a new TempNet begin near a constant, moved into its range; return the weights that give it to every token."""
    config = network.config
    share = (tau - config.tau_min) / (config.tau_max - config.tau_min)
    score = torch.logit(torch.tensor(share), eps=_LEAST_SHARE_OF_START)
    with torch.no_grad():
        if config.pooling == "linear":
            network.final.bias.fill_(score)
        else:
            network.pool_bias.fill_(-score)
    weights = {name: value.detach().clone() for name, value in network.state_dict().items()}
    weights["final.weight" if config.pooling == "linear" else "pool_weight"].zero_()
    return weights


def describe_plan(plan: RewardPlan, tracking_uri: str) -> str:
    """Return the plan as lines of name and text; without a tracking URI the run is not logged."""
    config, leash = plan.config, plan.config.leash
    with torch.device("meta"):
        base: Any = AutoModelForCausalLM.from_config(
            read_config(local_copy(config.model, with_weights=False), trust_remote_code=config.trust_remote_code),
            trust_remote_code=config.trust_remote_code,
        )
        network = TempNet(plan.network)
    num_training = config.num_steps * config.prompts_per_step * config.group_size
    num_batches = sum(
        min(left, number) * each for number in (len(CONSTANTS), 1 + len(plan.goal_steps)) for left, each in ROUNDS
    )
    num_groups = num_batches * config.prompts_per_step + _NUM_COMPARED * len(plan.places_of_verdict())
    num_beside = num_groups * config.group_size
    longest = max(len(question.ids) for question in plan.questions)
    most = (num_training + num_beside) * config.max_new_tokens
    most_kl = f"{leash.allowance:g} × −log of the reward there"
    if leash.target_kl is not None:
        most_kl = f"{leash.target_kl:g} nats a text"
    goals = ", ".join(map(str, plan.goal_steps))
    where = "1 GPU" if config.workers.use_gpu else f"{config.workers.cpus_per_worker:g} CPUs"
    rows = {
        "run": f"{config.name} in {config.run.directory}",
        "model": f"{config.model}, {base.num_parameters():,} parameters in {config.dtype}, frozen",
        "TempNet": f"{sum(value.numel() for value in network.parameters()):,} parameters, reads {config.temperature.input}",
        "prompts": f"{_describe_questions(plan.questions)}; {plan.num_too_long} too long and left out",
        "held out": f"{_describe_questions(plan.held_out)}; the verdict is about them"
        if plan.held_out
        else "none: the verdict is about new texts of the training prompts; --held-out-prompts FILE",
        "verifier": f"{config.verifier.name}, at most {config.verifier.seconds:g} s a text; reward: {config.reward}",
        "steps": f"{config.num_steps} of {config.prompts_per_step} prompts × {config.group_size} texts; checkpoint every "
        f"{config.checkpoint_every}",
        "texts": f"{num_training:,} to learn from, {num_beside:,} to choose the constant and the leash, and for the verdict",
        "tokens": f"at most {most:,} new ones, {config.max_new_tokens} a text after prompts of at most {longest}",
        "leash": f"from the best of {len(CONSTANTS)} constants, KL rises to {most_kl}; "
        f"λ is {'found' if leash.reset_steps else 'fixed'}, first {leash.weight:g}; of the weights "
        f"after steps 0, {goals} the best are kept",
        "workers": f"{config.workers.num_workers} × {where}, {config.prompts_at_a_time} prompts at a time",
        "memory": f"about {describe_memory(_memory(plan, base))}",
        "MLflow": masked(tracking_uri) or "off",
    }
    return "\n".join(f"{name:<14}{text}" for name, text in rows.items())


def _memory(plan: RewardPlan, base: Any) -> dict[str, float]:
    """Return the bytes of a worker at its peak, by arithmetic."""
    config, text = plan.config, base.config.get_text_config()
    size = getattr(torch, config.dtype).itemsize
    num_texts = config.prompts_at_a_time * config.group_size
    num_tokens = num_texts * (max(len(question.ids) for question in plan.asked) + config.max_new_tokens)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_width = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size
    return {
        "process": PROCESS_BYTES[config.workers.use_gpu],
        "weights": base.num_parameters() * size,
        "keys and values": 2 * text.num_hidden_layers * key_width * num_tokens * size,
        # queries, keys, values, the four of the MLP, residuals
        "a layer": 10 * text.hidden_size * num_tokens * size,
        # logits, logits/τ, probabilities, products
        "logits": 4 * max(NUM_TOKENS_AT_A_TIME, num_texts) * plan.network.input_size * 4,
    }


def _describe_questions(questions: tuple[Question, ...]) -> str:
    lengths = [len(question.ids) for question in questions]
    return f"{len(questions)} of {min(lengths)} to {max(lengths)} tokens"
