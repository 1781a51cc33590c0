"""Score windows with a tiny model, put the harness around it, and write tasks for the harness."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from evaluation_support import MAX_LENGTH, QUESTIONS, BruteForce, write_lines

from jobs.scoring.language_models.config import Temperature
from jobs.scoring.language_models.harness import Tasks, TemperedLM
from jobs.scoring.language_models.windows import Score, ScoredWindow, score_windows

EXAMPLES = Path(__file__).parents[3] / "benchmarks" / "tasks"


def scores(brute: BruteForce, windows: list[ScoredWindow], names: list[str], batch_size: int = 3) -> dict[str, Score]:
    brute.reset()
    functions = {name: Temperature.parse(name).function(brute.network) for name in names}
    return score_windows(brute.base, windows, functions, vocab_size=len(brute.tokenizer), batch_size=batch_size)


def harness(brute: BruteForce, name: str, **changes: Any) -> TemperedLM:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    options: dict[str, Any] = {"max_length": MAX_LENGTH, "batch_size": 3, "document_start": True} | changes
    brute.reset()
    return TemperedLM(
        brute.base,
        brute.tokenizer,
        temperature=Temperature.parse(name),
        network=brute.network,
        vocab_size=len(brute.tokenizer),
        **options,
    )


def write_tasks(directory: Path) -> Tasks:
    for name in ("arc_easy_test", "arc_challenge_test", "openbook_qa_test"):
        write_lines(directory / f"{name}.jsonl", QUESTIONS)
    write_lines(
        directory / "gsm8k_test.jsonl",
        [{"question": f"{n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(4)],
    )
    return Tasks(str(EXAMPLES), str(directory))
