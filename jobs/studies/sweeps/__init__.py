"""Sweeps: one training run for every point of a grid, and which of them lands in the band of mean temperature."""
