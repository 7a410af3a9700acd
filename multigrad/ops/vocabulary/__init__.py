"""Losses of a large vocabulary, without the logits."""
