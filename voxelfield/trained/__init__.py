"""Trained models: rendering, evaluation, and the files in which they are saved."""
