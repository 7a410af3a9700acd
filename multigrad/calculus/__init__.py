"""Gradients of functions: `grad`, `vjp`, `jvp`, `jacobian` and `hessian`, which `multigrad` exports.

Code belongs here if it differentiates a user's function, or checks that a rule is linear. This file exports
nothing, because the backends import `calculus.linearity` while `multigrad.backend` is still loading.
"""
