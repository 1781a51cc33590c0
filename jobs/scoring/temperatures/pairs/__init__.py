"""Temperatures of image-text pairs: the settings, the models' part, and the Ray Data job that writes the tables."""
