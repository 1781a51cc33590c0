"""Sentence data: spans of documents for DeCLUTR (arXiv 2006.03659), and labelled sentences."""
