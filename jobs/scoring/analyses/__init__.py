"""Analyses: what the temperatures of a trained network say about groups of texts."""
