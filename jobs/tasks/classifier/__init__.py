"""The task of fine-tuning sentence classifiers with the TripleEntropy loss, evaluated by cross-validation."""
