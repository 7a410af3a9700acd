"""What a custom gradient costs: multigrad against what an expert writes by hand for the active backend.

`python -m benchmarks` measures, with KERAS_BACKEND set, in one process and in turns:

- native: `jax.custom_vjp`, a `torch.autograd.Function` or `tf.custom_gradient`, with the same Keras ops;
- multigrad;
- keras: `keras.ops.custom_gradient`, where it can be used;
- plain: the function without a rule, for scale.

Its rooms: `cases.py` has the functions and their rules, `native/` a module a framework with the same names,
`measure.py` the clock, `growth.py` the curves, `memory.py` the bytes, and `report.py` the table, the file and
the picture. `large_vocabulary.py` is a command of its own, for an op in chunks.
"""
