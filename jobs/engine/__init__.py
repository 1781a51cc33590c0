"""The training loop that all tasks share: configuration, launch, engine, checkpoints, schedules and tracking."""
