"""A metric of lm-eval: whether an answer holds the words that are wanted."""

from __future__ import annotations


def holds(references: list[str], predictions: list[str]) -> float:
    """Give 1.0 if it does, else 0.0."""
    return float(references[0].lower() in predictions[0].lower())
