"""Temperatures of image-text pairs: the configuration, the settings, and the Ray Data job that writes the tables."""
