"""The private names of TensorFlow that this backend uses (TensorFlow 2.17 to 2.21).

They are looked up when the backend is imported. A missing name raises an ImportError then. Where no reason is
given, TensorFlow has no public API for the purpose.
"""

from multigrad.common.frameworks import look_up

_RECORD = "tensorflow.python.eager.record"

# Record an operation with its own gradient on the active tapes, or with its own derivative in forward mode.
# The public API is the registry of `tf.custom_gradient`, which keeps graphs alive.
record_operation_backprop_only = look_up(f"{_RECORD}.record_operation_backprop_only")
record_operation_forwardprop_only = look_up(f"{_RECORD}.record_operation_forwardprop_only")
# Return whether a tape or forward mode is active.
could_possibly_record = look_up(f"{_RECORD}.could_possibly_record")
# Run code that no tape records. The public API needs the tape.
stop_recording = look_up(f"{_RECORD}.stop_recording")
# Record the variables that a function reads, as `tf.custom_gradient` does.
VariableWatcher = look_up(f"{_RECORD}.VariableWatcher")
# Return the tangents of tensors in all active accumulators.
pack_tangents = look_up("tensorflow.python.eager.forwardprop_util.pack_tangents")
# Return whether tapes and accumulators together may compute a higher derivative with respect to tensors.
possible_gradient_types = look_up("tensorflow.python.ops.gradients_util.PossibleTapeGradientTypes")
HIGHER_ORDER = look_up("tensorflow.python.ops.gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER")
# Let tapes record while an accumulator of forward mode computes the tangents of an operation.
push_forwardprop_state = look_up("tensorflow.python.eager.forwardprop_util.push_forwardprop_state")
# Register how `tf.vectorized_map` converts an operation.
RegisterPFor = look_up("tensorflow.python.ops.parallel_for.pfor.RegisterPFor")
wrap = look_up("tensorflow.python.ops.parallel_for.pfor.wrap")

# The attribute of an operation that names its gradient function, which `tf.Graph.gradient_override_map` sets.
# A test fails if it changes.
GRADIENT_KIND = "_gradient_op_type"
