"""The overhead of custom gradients: multigrad compared with hand-written code for the active backend.

`python -m benchmarks` measures the backend in KERAS_BACKEND. It times up to four implementations of each
function in alternation, in one process:

- native: `jax.custom_vjp`, `torch.autograd.Function` or `tf.custom_gradient`, with the same Keras ops;
- multigrad: `multigrad.op_custom_gradient`;
- keras: `keras.ops.custom_gradient`, where it supports the function;
- plain: the function without a rule, for scale.

`cases.py` defines the functions and their rules. `native/` has a module for each framework, with the same
functions in each. `measure.py` measures time, `growth.py` measures how time grows with size, `memory.py`
measures memory, and `report.py` shows and stores the results.

Other modules are separate commands, such as `python -m benchmarks.equations`: `large_vocabulary`,
`equations`, `fixed_ops`, `training_steps`, `gradient_logger`, `gradient_checks`, and `accelerator`, which
writes a report of the tests and benchmarks on a GPU.
"""
