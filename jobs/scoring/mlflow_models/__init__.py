"""What a training run leaves behind, as models in MLflow: its checkpoints, and the export that predicts temperatures."""
