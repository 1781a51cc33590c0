"""Benchmarks that compare this project with other implementations, measured side by side in one run."""
