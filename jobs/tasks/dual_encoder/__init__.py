"""Dual encoders with contrastive losses as a task of the training loop: configuration, modules, validation, report."""
