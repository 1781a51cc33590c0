"""Data in motion: archives to documents to packed blocks to ordered batches. Knows nothing of models or training."""
