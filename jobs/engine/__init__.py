"""The training loop that all tasks share: configuration, launch, engine, checkpoints, schedules and tracking."""


class FailedError(RuntimeError):
    """What a job has begun has failed; the message is what the user is told."""
