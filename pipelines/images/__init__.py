"""Image–text data: archive indexes, image views (crops and augmentation), caption tokens, and pairs for training."""
