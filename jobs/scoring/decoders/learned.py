"""The learned decoders of the bench, trained on the choosing half of the text with the base model frozen.

    TempNet, robust loss    the papers' objective, for the mean entropy of the model's predictions at τ = 1
    TempNet, proper score   the calibrating objective
    AutoDeco                temperature and top-p heads by their published objective (`tempnet.decoders.autodeco`)

Every learned rule has two controls, made from what it predicts on the choosing half: the constant that equals its mean
(MeanShift), and its own predictions in random order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import TopPLogitsWarper

from jobs.scoring.decoders.model import FrozenModel, MeasuredText
from tempnet.decoders.autodeco import AutoDeco, AutoDecoHeads, autodeco_loss
from tempnet.decoders.rules import (
    ConstantTemperature,
    PredictedTemperature,
    Rule,
    Shuffled,
    Warped,
    entropy,
    temper,
)
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.reference import language_model_loss

ROBUST, PROPER, AUTODECO = "TempNet, robust loss", "TempNet, proper score", "AutoDeco"
SCALES = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 3.0)
"""Levels of learned temperatures to choose from, as factors; the choice of τ_max at inference is such a factor."""
_BATCH_SIZE = 512
_RATE = 3e-3
_NUM_LOGITS_AT_ONCE = 1 << 24


def train_networks(
    model: FrozenModel, text: MeasuredText, *, num_steps: int, seed: int
) -> dict[str, TempNet | AutoDecoHeads]:
    """Train the networks of the three learned decoders.

    Args:
        model: the frozen model.
        text: tokens to train on.
        num_steps: number of steps of each network.
        seed: seed of weights and batches.
    """
    made: dict[str, TempNet | AutoDecoHeads] = {}
    rho = math.log(model.vocab_size) - mean_entropy(model, text)
    for name, loss in ((ROBUST, "dro"), (PROPER, "proper")):
        torch.manual_seed(seed)
        made[name] = _train_tempnet(model, text, loss, rho=rho, num_steps=num_steps, seed=seed)
    torch.manual_seed(seed)
    heads = AutoDecoHeads(text.hidden.shape[-1]).to(model.device)
    generator = torch.Generator().manual_seed(seed)

    def step(rows: Tensor) -> Tensor:
        hidden, targets = text.hidden[rows].to(model.device), text.targets[rows].to(model.device)
        return autodeco_loss(heads, model.logits(hidden), hidden, targets, generator=generator)

    optimise(heads, step, len(text.targets), num_steps=num_steps, seed=seed)
    made[AUTODECO] = heads
    return {name: network.eval().requires_grad_(False).cpu() for name, network in made.items()}


def _train_tempnet(
    model: FrozenModel, text: MeasuredText, loss: str, *, rho: float, num_steps: int, seed: int
) -> TempNet:
    changes = {"rho": rho} if loss == "dro" else {"rho": 0.0}
    network = TempNet(TempNetConfig.for_logits(model.vocab_size, input_shift="mean", **changes)).to(model.device)
    config = TemperatureLossConfig(name=loss, rho=rho)

    def step(rows: Tensor) -> Tensor:
        logits = model.logits(text.hidden[rows])
        return language_model_loss(logits, text.targets[rows].to(logits.device), config, network)[0]

    optimise(network, step, len(text.targets), num_steps=num_steps, seed=seed)
    return network


def optimise(
    network: nn.Module, step: Callable[[Tensor], Tensor], num_tokens: int, *, num_steps: int, seed: int
) -> None:
    """Minimise a loss of batches of tokens with AdamW, whose rate falls to 0 linearly."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / num_steps)
    network.train()
    for _ in range(num_steps):
        loss = step(torch.randint(num_tokens, (_BATCH_SIZE,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def mean_entropy(model: FrozenModel, text: MeasuredText) -> float:
    """Return the mean entropy of the model's predictions at τ = 1, in nats."""
    total = sum(entropy(temper(model.logits(part), 1.0)).double().sum().item() for part in _parts(model, text.hidden))
    return total / len(text.targets)


def learned_rules(name: str, network: TempNet | AutoDecoHeads) -> list[Rule]:
    """Return the rules to choose from for a network: temperatures at several levels; AutoDeco has no parameter."""
    if isinstance(network, AutoDecoHeads):
        return [AutoDeco(network, name)]
    return [PredictedTemperature(network.eval(), name, scale) for scale in SCALES]


def control_rules(model: FrozenModel, text: MeasuredText, rule: Rule) -> tuple[Rule, Rule] | None:
    """Return the controls of a learned rule, MeanShift and shuffled; None for a rule that is not learned.

    Args:
        model: the frozen model.
        text: tokens whose predictions make the mean and the pool.
        rule: the learned rule.
    """
    taus, shares = [], []
    for part in _parts(model, text.hidden):
        if isinstance(rule, AutoDeco):
            tau, share = rule.predict(model.logits(part), part.to(model.device))
            shares.append(share.cpu())
        elif isinstance(rule, PredictedTemperature):
            tau = rule.temperatures(model.logits(part), part.to(model.device))
        else:
            return None
        taus.append(tau.cpu())
    pool, truncated = torch.cat(taus), torch.cat(shares) if shares else None
    mean = pool.mean().item()
    shift: Rule = ConstantTemperature(mean)
    if truncated is not None:
        mean_share = truncated.mean().item()
        shift = Warped(f"top-p {mean_share:.3g}", TopPLogitsWarper(mean_share), mean)
    return shift, Shuffled(pool, rule.label, truncated)


def move_rule(rule: Rule, device: torch.device) -> Rule:
    """Move the network of a learned rule to a device, and return the rule."""
    if isinstance(rule, PredictedTemperature):
        rule.network.to(device)
    elif isinstance(rule, AutoDeco):
        rule.heads.to(device)
    return rule


def _parts(model: FrozenModel, hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden.split(max(1, _NUM_LOGITS_AT_ONCE // model.vocab_size))
