"""Evaluation of language models at several temperatures: perplexities and tasks of lm-evaluation-harness."""
