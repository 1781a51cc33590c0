"""Text: archives become documents, documents blocks of tokens."""
