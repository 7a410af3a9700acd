"""Gradients of functions: `grad`, `vjp`, `jvp`, `jacobian` and `hessian`, which `multigrad` exports.

Code belongs here if it differentiates a user's function. This file exports nothing: `multigrad` imports each
name on first use.
"""
