"""Ops that keep a value, or round it, and have another gradient."""
