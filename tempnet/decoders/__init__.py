"""Decoders: rules that turn logits into the distribution that is sampled from, and measures to compare them by."""
