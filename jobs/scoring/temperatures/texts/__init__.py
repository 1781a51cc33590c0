"""Temperatures of text archives: reading, windows, the model's part, tables, and the Ray Data job over them."""
