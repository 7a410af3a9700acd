"""An audit of the gradients of `keras.ops`, `multigrad.ops`, `keras.losses` and `keras.activations`.

`table` collects the ops and their special points, which are in one file for each kind of op. `truth`
computes the derivatives from formulas and finite differences in float64, and `measure` those of the active
backend. `stored/` contains the results of each backend, and `python -m audit` renews them.
"""
