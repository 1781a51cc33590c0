"""The commands of the project: training, evaluation, prediction and data preparation."""
