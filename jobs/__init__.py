"""What a person submits: training, evaluation, prediction, data preparation."""
