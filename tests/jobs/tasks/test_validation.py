"""Test that the figures of a validation or a step are those of all tokens, pairs or spans, and the page of the tokens."""

from __future__ import annotations

import html
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from transformers import AutoConfig, AutoModelForCausalLM

from jobs.tasks.dual_encoder.plan import ClipPlan
from jobs.tasks.dual_encoder.validation import HeldOut, one_temperature
from jobs.tasks.image_encoder.task import probe_accuracy
from jobs.tasks.language_model.report import coloured_page, summary_table
from jobs.tasks.language_model.validation import validate
from jobs.tasks.sentence_encoder.task import SpanStatistics
from pipelines.text.packing import IGNORE_INDEX
from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig
from tempnet.dro import robust_loss
from tempnet.intervals import mean_interval
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.oracle import optimal_temperature
from tempnet.softmax.config import TemperatureLossConfig

LOSS = TemperatureLossConfig(name="dro", rho=1.5)
VOCABULARY, NUM_BLOCKS, LENGTH = 61, 8, 12


def make_module() -> TemperatureCausalLM:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **settings, initializer_range=0.5))
    network = TempNet(TempNetConfig.for_logits(VOCABULARY, rho=LOSS.rho, hidden_size=16, num_prototypes=8))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter))
    return TemperatureCausalLM(base, network, LOSS, vocab_size=VOCABULARY).eval()


def blocks() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    tokens = generator.integers(VOCABULARY, size=(2, NUM_BLOCKS, LENGTH))
    tokens[1][generator.random((NUM_BLOCKS, LENGTH)) < 0.3] = IGNORE_INDEX
    positions = np.tile(np.arange(LENGTH), (NUM_BLOCKS, 1))
    documents = np.arange(NUM_BLOCKS * LENGTH).reshape(NUM_BLOCKS, LENGTH) // 7 * 10  # across the ends of blocks
    return {"input_ids": tokens[0], "position_ids": positions, "targets": tokens[1], "documents": documents}


@torch.no_grad()
def validated(
    arrays: dict[str, np.ndarray], micro_batch_size: int, *, num_oracle_tokens: int = 8, with_details: bool = False
) -> tuple[dict[str, float], dict[str, Any] | None]:
    module = make_module()

    def forward(*, num_profile_nodes: list[int], **batch: Any) -> Any:
        return [module(**batch, num_profile_nodes=num_profile_nodes[0])]

    (tally,) = validate(
        forward, arrays, [LOSS], vocab_size=VOCABULARY, micro_batch_size=micro_batch_size,
        num_oracle_tokens=num_oracle_tokens, with_details=with_details, device=torch.device("cpu"),
    )  # fmt: skip
    return tally.scores()


@torch.no_grad()
def predictions(arrays: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    module, is_valid = make_module(), torch.from_numpy(arrays["targets"] != IGNORE_INDEX)
    logits = module.logits(torch.from_numpy(arrays["input_ids"]), torch.from_numpy(arrays["position_ids"]))[is_valid]
    assert module.tempnet is not None
    return logits, torch.from_numpy(arrays["targets"])[is_valid], module.tempnet(logits)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_correlation_rivals_and_regret_are_those_of_all_tokens_by_document(micro_batch_size: int) -> None:
    """The reference has the logits of all tokens; profiles interpolate between temperatures."""
    arrays = blocks()
    scores, details = validated(arrays, micro_batch_size, num_oracle_tokens=5, with_details=True)
    assert details is not None
    assert details["judged_by"] == "robust"
    found, is_valid = details["rivals"], arrays["targets"] != IGNORE_INDEX
    logits, targets, tau = predictions(arrays)
    entropy = torch.distributions.Categorical(logits=logits.double()).entropy()
    assert scores["tau_entropy_spearman"] == pytest.approx(float(spearmanr(tau, entropy).statistic), abs=1e-4)
    documents = torch.from_numpy(arrays["documents"][is_valid])
    assert (found["num_tokens"], found["num_documents"]) == (is_valid.sum(), len(documents.unique()))

    def losses(temperature: torch.Tensor | float) -> dict[str, torch.Tensor]:
        temperature = torch.as_tensor(temperature).expand(len(tau))
        return {
            "robust": robust_loss(logits, targets, temperature, LOSS.rho).double(),
            "cross_entropy": F.cross_entropy(logits / temperature[:, None], targets, reduction="none").double(),
        }

    order = torch.cartesian_prod(torch.arange(len(tau)), torch.arange(len(tau)))  # every τ at every token
    every = {
        "robust": robust_loss(logits[order[:, 0]], targets[order[:, 0]], tau[order[:, 1]], LOSS.rho),
        "cross_entropy": F.cross_entropy(logits[order[:, 0]] / tau[order[:, 1], None], targets[order[:, 0]]),
    }
    for loss, own in losses(tau).items():
        assert found[f"{loss}/loss"] == pytest.approx(own.mean().item(), abs=1e-5)
        for constant in ("mean_shift", "best_constant"):
            at = losses(found[f"{loss}/{constant}_tau"])[loss]
            assert found[f"{loss}/{constant}_loss"] == pytest.approx(at.mean().item(), abs=2e-4)
            gain = (found[f"{loss}/{constant}_gain"], found[f"{loss}/{constant}_gain_half_width"])
            assert gain == pytest.approx(mean_interval(at - own, documents), abs=5e-4)
        assert found[f"{loss}/shuffled_loss"] == pytest.approx(every[loss].double().mean().item(), abs=2e-3)
        least = min(losses(value)[loss].mean().item() for value in np.geomspace(0.125, 2.0, 400))
        assert losses(found[f"{loss}/best_constant_tau"])[loss].mean().item() <= least + 1e-4
    assert found["robust/mean_shift_tau"] == pytest.approx(scores["tau_mean"], abs=1e-6)
    # Five of the tokens, spread evenly, have an oracle.
    chosen = torch.arange(1, 6) * len(tau) // 5 + (torch.arange(1, 6) * len(tau) % 5 > 0) - 1
    regret = losses(tau)["robust"] - losses(optimal_temperature(logits, LOSS.rho))["robust"]
    assert scores["regret"] == pytest.approx(regret[chosen].mean().item(), abs=1e-5)


@pytest.mark.parametrize("name", [name for name, kind in LOSS_KINDS.items() if kind.temperature != "tempnet"])
def test_every_contrastive_loss_has_a_cross_entropy_at_its_own_temperature(name: str) -> None:
    config = ContrastiveLossConfig.for_name(name)
    has_own = config.kind.temperature in ("learned", "per_sample", "given")
    scores = {"tau_mean": 0.03} if has_own else {}
    tau = 0.03 if has_own else config.tau
    generator = torch.Generator().manual_seed(0)
    image, text = (F.normalize(torch.randn(20, 8, generator=generator, dtype=torch.float64), dim=-1) for _ in range(2))
    cosines = image @ text.T
    logits = torch.log((1 + cosines) / (1 - cosines)) if config.kind.temperature == "free" else cosines / tau
    target = torch.arange(20)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    held_out = HeldOut(image=image, text=text, image_of_text=target.numpy())
    found = held_out.scores(one_temperature(config, scores))
    assert found["cross_entropy_tau"] == pytest.approx(float(expected), rel=1e-9)


TAU = torch.tensor([[0.02, 0.04, 0.03, 0.05], [0.1, 0.2, 0.1, 0.2]])


def summary(name: str, parts: list[torch.Tensor] | list[None], mlm_loss: float | None) -> dict[str, float]:
    """Return the summary of a step of which every rank has a part of the temperatures."""
    config, one, found = ContrastiveLossConfig.for_name(name), torch.tensor(1.0), []
    for number, tau in enumerate(parts):
        contrastive: Any = None if tau is None else {"loss": one, "tau": tau, "log_u": None, "dual_gradient": None}
        output: Any = {"loss": one, "mlm_loss": mlm_loss and mlm_loss * one, "contrastive": contrastive}
        found.append(SpanStatistics.of(output, config, num_documents=4, num_crowded=number))
    found[0].sums.add_(found[1].sums)  # The training loop adds up ranks in the same way.
    return found[0].summary()


def test_the_means_of_a_sentence_encoders_step_are_those_of_all_ranks() -> None:
    found = summary("clip", [TAU[:, :2], TAU[:, 2:]], 2.5)
    wanted = {"mlm_loss": 2.5, "share_crowded": 1 / 8, "tau_mean": float(TAU.mean())}
    wanted |= {"tau_mean_anchor": float(TAU[0].mean()), "tau_mean_positive": float(TAU[1].mean())}
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-6)
    assert summary("clip", [None, None], 2.5).keys() == {"share_crowded", "mlm_loss"}
    free = summary("temperature_free", [torch.ones(2, 2), torch.ones(2, 2)], None)
    assert free == {"share_crowded": pytest.approx(1 / 8)}


@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_the_linear_probe_is_a_logistic_regression_on_standardised_features(strength: float) -> None:
    rng, labels = np.random.default_rng(0), np.arange(300) % 3
    features = 5 + (rng.normal(size=(300, 4)) + np.eye(4)[labels]) * [1.0, 10.0, 0.1, 1.0]
    scaled = (features - features[:200].mean(0)) / features[:200].std(0)
    expected = LogisticRegression(C=strength).fit(scaled[:200], labels[:200]).score(scaled[200:], labels[200:])
    parts = (features[:200], labels[:200], features[200:], labels[200:])
    assert probe_accuracy(*parts, regularisation=strength) == expected


def spans(page: str) -> list[tuple[str, ...]]:
    found = re.findall(r'<span\b[^>]*?style="([^"]*)"[^>]*?title="([^"]*)"[^>]*>([^<]*)</span>', page)
    return [tuple(map(html.unescape, values)) for values in found]


def test_tokens_are_escaped_and_told_apart() -> None:
    tokens, tau = ["<script>", " a&b", '"x"', " d"], [0.2, 0.8, 1.4, 1.4]
    note = ' · likeliest at τ: " <b>" 75.0%'
    page = coloured_page(title="T", sections={"<S>": (tokens, tau, [4.0, 3.0, 1.0, 1.0], [note, "", "", ""])})
    assert "<script>" not in page
    assert page.count('<span tabindex="0"') == len(tokens)  # so that a tapped token takes the focus and shows its title
    colours, titles, texts = zip(*spans(page), strict=True)
    assert list(texts) == tokens
    assert titles[0] == "τ 0.200 · entropy 4.00 nats at τ = 1" + note
    assert len(set(colours)) == 3
    assert colours[2] == colours[3]


ROBUST = ("robust/loss", "robust/oracle_loss")


def outcome_of(loss: str, **scores: float) -> dict[str, Any]:
    """Return the outcome of a language model's run as far as the summary reads it."""
    names = ("tau_mean", "tau_q05", "tau_q95", "tau_std", "tau_share_lower_bound", "tau_share_upper_bound")
    figures = dict.fromkeys((*names, "tau_entropy_spearman", "cross_entropy", "cross_entropy_tau"), 0.5) | scores
    rest = {"rivals": {}, "num_steps": 2, "num_epochs": 1.0, "tokens_per_second": None}
    return {"loss": loss, "validation": figures, **rest}


def test_a_perplexity_that_no_float_holds_is_infinite() -> None:
    """At a τ of .001 a cross-entropy is some thousands of nats."""
    text = summary_table(outcome_of("fixed", cross_entropy=2.0, cross_entropy_tau=2000.0))
    assert re.search(r"perplexity at τ = 1 +7\.39\n.*perplexity at τ +inf\n", text)


def test_the_summary_has_the_rho_that_its_figures_are_of() -> None:
    """A ρ that is steered moves by what the target entropy loses."""
    begun = {"rho": 3.0, "target_entropy": 4.0, "rivals": {"oracle_tau_mean": 1.0} | dict.fromkeys(ROBUST, 0.5)}
    assert "3.0000 (4.0000 nats)" in summary_table(outcome_of("dro") | begun)
    assert "3.7500 (3.2500 nats)" in summary_table(outcome_of("dro", rho=3.75) | begun)
    scores: dict[str, float] = dict.fromkeys(
        (f"{side}_recall@{k}" for side in ("image", "text") for k in (1, 5, 10)), 0.5
    )
    scores |= {"cross_entropy_tau": 1.0, "mean_recall": 0.5}
    outcome = {"loss": "tempnet", "rho": 3.0, "best_rating": None, "share_cut": {}, "num_text_tokens": 30}
    for last in (scores, scores | {"rho": 3.75}):
        rows = ClipPlan.rows(SimpleNamespace(), outcome | {"validation": last})  # type: ignore[arg-type]
        assert rows[0] == ("loss", f"tempnet, ρ = {last.get('rho', 3.0):g}")
