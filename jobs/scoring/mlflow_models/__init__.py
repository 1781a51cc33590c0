"""The results of a training run as MLflow models: its checkpoints, and its export, which predicts temperatures."""
