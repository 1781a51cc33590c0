"""Losses of a language model whose softmax has a temperature for every token."""
