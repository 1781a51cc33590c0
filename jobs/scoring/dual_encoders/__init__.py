"""Evaluation of image-text models: retrieval in both directions and zero-shot classification."""
