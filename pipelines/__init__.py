"""Data pipelines: archives → documents → packed blocks → ordered batches, independent of models and training."""
