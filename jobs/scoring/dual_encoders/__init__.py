"""Evaluation of image-text models: retrieval both ways and zero-shot classification."""
