"""Contrastive learning of images and texts with learned temperatures."""
