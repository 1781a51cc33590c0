"""Sentences: DeCLUTR's spans of documents, and labelled sentences."""
