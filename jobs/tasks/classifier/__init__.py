"""Fine-tuning sentence classifiers by TripleEntropy, cross-validated."""
