"""Bad input to training on rewards is refused before anything is started, naming the field, the value and what is legal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.tasks.language_model.config import TemperatureSection
from jobs.train_reward import main


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * size, "answer": "y"}) + "\n" for size in (1, 5)))
    return path


def refused(capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, *options: str) -> str:
    storage = prompts.parent / "runs"
    arguments = ["--model", str(model), "--prompts", str(prompts), "--storage", str(storage), *options]
    arguments += [] if "--verifier.name" in options else ["--verifier.name", "exact"]
    arguments += [] if "--max-new-tokens" in options else ["--max-new-tokens", "8"]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    assert (stopped.value.code, said.count("\n")) == (2, 1), said
    assert not storage.exists()
    return said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group-size", "1"], "group_size = 1 must be at least 2"),
        (["--num-steps", "0"], "num_steps = 0 must be at least 1"),
        (["--learning-rate", "0"], "learning_rate = 0 must be positive"),
        (["--leash.target-kl", "-1"], "leash.target_kl = -1.0 must be positive"),
        (["--leash.ramp-share", "1.5"], "leash.ramp_share = 1.5 must lie in [0, 1]"),
        (["--verifier.seconds", "0"], "verifier.seconds = 0.0 must be positive"),
        (["--temperature.tau-min", "3"], "0 < tau_min < tau_max does not hold"),
        (["--format", "gsm8k"], "verifier.name = exact needs other fields than format = gsm8k has"),
        (["--name", "a/b"], "must be a plain file name"),
        (["--workers.num-workers", "0"], "workers.num_workers = 0 must be positive"),
        (["--max-new-tokens", "64"], "max_new_tokens = 64 leaves no room for a prompt"),
        (["--max-new-tokens", "63", "--chat", "on"], "chat = on: the tokenizer of"),
        (["--verifier.name", "no_such_module:check"], "verifier.name = no_such_module:check: ModuleNotFoundError"),
        (["--verifier.name", "no-such-command"], "none of exact, gsm8k and unit-tests"),
        (["--verifier.name", "unit-tests"], "prompt 1: verifier.name = unit-tests runs `tests`"),
        (["--temperature.path", "{model}"], "holds a TempNet with"),
        (["--temperature.path", "missing"], "temperature.path = missing is missing"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--model", "missing"], "missing"),
        (["--held-out-prompts", "missing.jsonl"], "held_out_prompts: prompts = "),
        (["--held-out-prompts", "{prompts}"], "2 of its prompts are in prompts = "),
        (["--held-out-prompts", "{bad}"], "prompt 'h1': verifier.name = exact"),
        (["--held-out-prompts", "{long}"], "held_out_prompts = '{long}': the shortest has"),
        (["--tracking.uri", "nowhere"], "tracking.uri = 'nowhere' is no address of MLflow"),
    ],
)
def test_a_refusal_names_what_is_wrong(
    gpt2: Path, prompts: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    places = {name: prompts.parent / f"{name}.jsonl" for name in ("bad", "long")}
    places["bad"].write_text(json.dumps({"id": "h1", "prompt": "new"}))
    places["long"].write_text(json.dumps({"prompt": "a b c d e f g " * 20, "answer": "y"}))
    places |= {"model": gpt2, "prompts": prompts}
    options = [option.format(**places) for option in options]
    assert message.format(**places) in refused(capsys, gpt2, prompts, *options)


def test_prompts_that_leave_no_room_are_left_out_and_refused_if_none_is_left(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a b c d e f g h i j k l m n o p\n")
    said = refused(capsys, gpt2, path, "--max-new-tokens", "60", "--verifier.name", "true")
    assert "the shortest has" in said
    assert "leaves room for 4 beside max_new_tokens = 60" in said


def test_training_of_language_models_says_where_rewards_are() -> None:
    with pytest.raises(ValueError, match=r"python -m jobs.train_reward"):
        TemperatureSection(loss="reward")
