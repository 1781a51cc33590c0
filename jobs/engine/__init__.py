"""The one training loop: configuration, launch, engine, checkpoints, schedules, tracking."""
