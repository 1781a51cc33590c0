"""Experiments whose generated texts are judged by other tools (TempNet Tables 1, 11 and 12, Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobs.studies.reproduction.experiment import PaperTable, Scale, Study
from jobs.studies.reproduction.experiments.language_models import (
    SMALL_CHANGES,
    TAU,
    distinct,
    experiment,
    frozen,
    with_base,
)

_CHAT = {f"llama2-chat-{size}-frozen": f"LLaMA-2 Chat {size.upper()}" for size in ("7b", "13b", "70b")}


def _trained_only(
    scale: Scale, title: str, presets: Mapping[str, str], table: PaperTable, notes: Sequence[str]
) -> tuple[Study, ...]:
    """Returns a study that only trains TempNets and reports their temperatures; the texts are judged by other tools."""
    return (
        Study(
            title=title,
            arms=with_base(scale, *(frozen(scale, presets[preset], preset) for preset in distinct(scale, presets))),
            table=table,
            changes=SMALL_CHANGES if scale == "small" else {},
            measures=(TAU,),
            notes=(
                "The claim is not about these figures, so the verdict is open. What it claims is measured by:",
                *notes,
            ),
        ),
    )


_CALIBRATE = "`python -m jobs.calibrate tau-max --model EXPORT --prompts PROMPTS --mean-tau 0.7`"


def _table_1(scale: Scale) -> tuple[Study, ...]:
    figures = ((5.35, 5.74, 1.42), (8.43, 8.58, 3.68), (14.69, 15.83, 11.4))
    return _trained_only(
        scale,
        "AlpacaEval 2.0",
        _CHAT,
        PaperTable(
            columns=("LC win rate at τ = .7, %", "with TempNet, %", "training, A100-hours"),
            rows=dict(zip(_CHAT.values(), figures, strict=True)),
        ),
        (
            _CALIBRATE,
            "`python -m jobs.generate --format alpaca-eval --model EXPORT --prompts alpaca_eval.json --output outputs.json`",
            "the win rate is given by alpaca_eval itself, which asks its judge",
        ),
    )


def _table_11(scale: Scale) -> tuple[Study, ...]:
    return _trained_only(
        scale,
        "GSM8K",
        {"llama2-7b-frozen": "LLaMA-2 7B"},
        PaperTable(
            columns=(*(f"maj@{k} at τ = .2" for k in (1, 8, 64)), *(f"maj@{k} with TempNet" for k in (1, 8, 64))),
            rows={"LLaMA-2 7B": (13.2, 15.5, 16.5, 12.8, 15.6, 17.3)},
        ),
        (
            "`python -m jobs.generate --format gsm8k --num-samples 64 --model EXPORT --prompts gsm8k.jsonl --output a`, "
            "and the same with `--temperature 0.2`: it prints maj@k",
        ),
    )


def _table_12(scale: Scale) -> tuple[Study, ...]:
    return _trained_only(
        scale,
        "MT-bench",
        _CHAT,
        PaperTable(
            columns=("default τ", "with TempNet"),
            rows=dict(zip(_CHAT.values(), ((6.27, 6.44), (6.65, 6.58), (6.89, 6.97)), strict=True)),
        ),
        (
            "`python -m jobs.generate --format mt-bench --model EXPORT --prompts question.jsonl --output answers.jsonl`",
            "the grades are given by FastChat's judge",
        ),
    )


def _figure_6_left(scale: Scale) -> tuple[Study, ...]:
    return _trained_only(
        scale,
        "SubjQA: mean τ of question and answer by subjectivity",
        {"llama2-chat-7b-frozen": "LLaMA-2 Chat 7B"},
        PaperTable(columns=(), rows={}),
        ("`python -m jobs.analyse subjectivity --model EXPORT --data SubjQA --output DIR`",),
    )


def _figure_6_right(scale: Scale) -> tuple[Study, ...]:
    return _trained_only(
        scale,
        "Alpaca: mean τ of instructions by root verb",
        {"llama2-chat-7b-frozen": "LLaMA-2 Chat 7B"},
        PaperTable(columns=(), rows={}),
        ("`python -m jobs.analyse instructions --model EXPORT --data alpaca_data.json --output DIR`",),
    )


EXPERIMENTS = (
    experiment("T1", "Instruction following", "Table 1", "LC win rates rise with a TempNet", _table_1),
    experiment("T11", "Arithmetic", "Table 11", "maj@8 and maj@64 rise with a TempNet, maj@1 falls", _table_11),
    experiment("T12", "Dialogue", "Table 12", "MT-bench rises for 7B and 70B", _table_12),
    experiment("F6-left", "Subjectivity", "Figure 6, left", "subjectivity rises with τ", _figure_6_left),
    experiment(
        "F6-right",
        "Instructions by verb",
        "Figure 6, right",
        "create, make have a high τ; calculate, edit a low one",
        _figure_6_right,
    ),
)
