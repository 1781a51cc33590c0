"""Sweeps: training runs at many points of a grid or search, and which of them end in a band of mean temperature."""
