"""Evaluation of sentence encoders: transfer to small classification tasks, and correlation with similarity scores."""
