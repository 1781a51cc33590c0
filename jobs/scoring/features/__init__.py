"""Storing the hidden states of a frozen language model."""
