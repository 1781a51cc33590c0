"""Temperatures of text archives: reading, windows, prediction, tables, and the Ray Data job that combines them."""
