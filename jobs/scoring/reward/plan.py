"""The plan of a run: its configuration, completed and checked before Ray is started or the model is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from jobs.engine.fields import with_absolute_paths
from jobs.engine.fingerprints import model_digest, tempnet_digest
from jobs.engine.identity import recorded_values
from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.formats import FORMATS, Prompt, read_prompts
from jobs.scoring.generation.job import prompt_text, room_for_prompts
from jobs.scoring.reward.config import RewardConfig
from jobs.scoring.verifiers.panel import Panel
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference, base_digest, find_base, read_config, read_reference
from tempnet.loading import load_tempnet
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt as the model reads it."""

    prompt: Prompt
    text: str
    """The text of the prompt, in the chat template if there is one."""
    ids: tuple[int, ...]
    """Its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """A checked configuration, with what follows from it; it is sent to the workers."""

    config: RewardConfig
    """The configuration, with absolute paths."""
    questions: tuple[Question, ...]
    """The prompts that leave room for `max_new_tokens` in the model's context."""
    held_out: tuple[Question, ...]
    """The held-out prompts that do; they are measured at the end."""
    num_too_long: int
    """Number of prompts, of both kinds, that do not, which are left out."""
    network: TempNetConfig
    """Configuration of the TempNet."""
    stop: tuple[str, ...]
    """Strings that end a text."""
    record: dict[str, Any]
    """Everything that decides the result, as plain values: the fields, and digests of the model and the prompts."""

    @property
    def asked(self) -> tuple[Question, ...]:
        """All prompts: those that are learned from, then the held-out ones."""
        return (*self.questions, *self.held_out)

    @property
    def generation(self) -> GenerateConfig:
        """The configuration of generation, which is that of `jobs.generate` with the same model and TempNet."""
        return _generation(self.config)

    def places_of_step(self, step: int) -> list[tuple[int, int]]:
        """Return which questions a step asks, and which samples of them: the place, and the number of the first sample.

        Questions come in an order that is shuffled anew for every pass over them, by the seed and the number of the pass.
        A question that a step asks more than once has other samples every time.
        """
        size, number = len(self.questions), self.config.prompts_per_step
        first = step * number
        places = []
        for position in range(first, first + number):
            order = list(range(size))
            random.Random(f"{self.config.seed}/order/{position // size}").shuffle(order)
            places.append(order[position % size])
        return [(place, places[:slot].count(place) * self.config.group_size) for slot, place in enumerate(places)]

    def held_out_places(self) -> list[tuple[int, int]]:
        """Return the places of the held-out questions among all, each with the number of its first sample."""
        return [(place, 0) for place in range(len(self.questions), len(self.asked))]


def make_plan(config: RewardConfig) -> RewardPlan:
    """Check a configuration against the model, the prompts, the verifier and the TempNet to start from.

    Raises:
        OSError: if a file is missing.
        ValueError: if they do not fit together; the message names the field, the value and what is legal.
    """
    config = with_absolute_paths(config)
    config = dataclasses.replace(config, storage=config.run.resolved_storage)
    prompts = read_prompts(config.prompts, config.format, config.limit)
    held_out = _read_held_out(config, prompts)
    with naming_field("model = "):
        place = local_copy(config.model, with_weights=False)
        base = read_config(place, trust_remote_code=config.trust_remote_code).get_text_config()
    with naming_field("model: "):
        tokenizer = load_tokenizer(config.model)
    if config.chat == "on" and tokenizer.chat_template is None:
        raise ValueError(f"chat = on: the tokenizer of {config.model} has no chat template")
    is_chat = config.chat != "off" and tokenizer.chat_template is not None
    fitting = _fitting("prompts", config, [_question(prompt, tokenizer, is_chat) for prompt in prompts])
    new = [_question(prompt, tokenizer, is_chat) for prompt in held_out]
    measured = _fitting("held_out_prompts", config, new) if new else ()
    plan = RewardPlan(
        config=config,
        questions=fitting,
        held_out=measured,
        num_too_long=len(prompts) + len(held_out) - len(fitting) - len(measured),
        network=config.temperature.network_config(len(tokenizer), base.hidden_size),
        stop=() if is_chat else FORMATS[config.format].stop,
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
    panel = Panel(config.verifier)
    try:
        panel.check((question.prompt.id, question.prompt.fields) for question in plan.asked)
    finally:
        panel.close()
    return plan


def _read_held_out(config: RewardConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the held-out prompts, of which none may be one that is learned from."""
    if not config.held_out_prompts:
        return []
    with naming_field("held_out_prompts: "):
        held_out = read_prompts(config.held_out_prompts, config.format, 0)
    known = {prompt.turns for prompt in prompts}
    if shared := [prompt for prompt in held_out if prompt.turns in known]:
        raise ValueError(
            f"held_out_prompts = {config.held_out_prompts!r}: {len(shared)} of its prompts are in prompts = "
            f"{config.prompts!r} too, the first with the id {shared[0].id!r}"
        )
    return held_out


def _question(prompt: Prompt, tokenizer: PreTrainedTokenizerFast, is_chat: bool) -> Question:
    text, ids = prompt_text(prompt.turns, [], tokenizer, is_chat)
    return Question(prompt=prompt, text=text, ids=tuple(ids))


def _fitting(field: str, config: RewardConfig, questions: Sequence[Question]) -> tuple[Question, ...]:
    """Return the questions that leave room for the new tokens; the field is that of their file."""
    room = room_for_prompts(_generation(config))
    fitting = tuple(question for question in questions if room is None or len(question.ids) <= room)
    if not fitting:
        raise ValueError(
            f"{field} = {getattr(config, field)!r}: the shortest has {min(len(question.ids) for question in questions)} "
            f"tokens, and the context of {config.model} leaves room for {room} beside max_new_tokens = "
            f"{config.max_new_tokens}"
        )
    return fitting


def make_network(plan: RewardPlan) -> TempNet:
    """Return the TempNet of the first step, in eval mode, in which it has no dropout.

    Raises:
        ValueError: if that of `temperature.path` has another configuration.
    """
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


def refer_to_base(plan: RewardPlan) -> BaseReference:
    """Return the reference by which the export names its base; if the model is such an export, that of its own base."""
    place = local_copy(plan.config.model)
    if (reference := read_reference(place)) is not None:
        find_base(place, fetch=local_copy)  # raises ValueError if another model is there now
        return reference
    return BaseReference(path=plan.config.model, digest=base_digest(place))


def _generation(config: RewardConfig) -> GenerateConfig:
    return GenerateConfig(
        model=config.model,
        prompts=config.prompts,
        output="unused",
        format=config.format,
        temperature="tempnet",
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        batch_size=config.prompts_at_a_time * config.group_size,
        chat=config.chat,
        dtype=config.dtype,
        device="cuda" if config.workers.use_gpu else "cpu",
        trust_remote_code=config.trust_remote_code,
        entropy=False,
    )


def _questions_digest(questions: tuple[Question, ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for question in questions:
        content = [question.prompt.id, question.text, dict(question.prompt.fields)]
        digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()
