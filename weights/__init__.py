"""Weights from and to other people's files, and a model from a run folder."""
