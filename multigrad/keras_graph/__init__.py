"""Ops in Keras models: the node of a Functional model, its saving, and the registry of named ops."""
