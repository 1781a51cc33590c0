"""Train a TempNet on the rewards that a verifier gives to texts of a frozen model, held near the model by a KL leash.

    python -m jobs.train_reward --model gpt2 --prompts questions.jsonl --verifier.name gsm8k
    python -m jobs.train_reward --model gpt2 --prompts tasks.jsonl --verifier.name unit-tests --reward distinct --dry-run

--dry-run: print the plan, and start nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job
from jobs.scoring.reward.config import RewardConfig


def parse(arguments: Sequence[str]) -> tuple[RewardConfig, bool]:
    """Return the settings, and whether only the plan is asked for."""
    rest = [argument for argument in arguments if argument != "--dry-run"]
    return parse_options(RewardConfig, rest, job="train_reward", description=__doc__), len(rest) < len(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    config, dry_run = parse(arguments)
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from jobs.engine.launch import print_where_to_look
    from jobs.scoring.reward.job import describe_run, train_reward

    with ending_in_one_line(lambda: config.run.directory):
        if dry_run:
            print(describe_run(config))
            return 0
        outcome = train_reward(config)
    generate = ["jobs.generate", "--model", outcome["export"], "--prompts", config.prompts, "--format", config.format]
    rest = ["--output", "texts.jsonl", "--max-new-tokens", str(config.max_new_tokens)]
    print()
    print_where_to_look(outcome, results="outcome.json", commands=[[*generate, *rest]])
    return 0


if __name__ == "__main__":
    run_job(main)
