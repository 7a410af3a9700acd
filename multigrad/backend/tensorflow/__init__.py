"""TensorFlow.

The native way to bind a custom derivative is `tf.custom_gradient`, whose function returns an output and a
closure. In a graph, it registers each closure under a new name for the life of the process, so that the graph
of every `tf.function` that calls it is never freed. Here, the registered function has a weak reference to the
graph, which holds the rule. The tapes record an op as they record `tf.custom_gradient`.

A SavedModel contains the trace of each rule, under a name that is unique across processes. A rule that was
not saved raises an error and is never confused with another rule.

The tapes also record the operations of the function. A second derivative goes through the residuals of the
rule. If a residual is an output of the op, the rule is rebuilt with the tied output, so that the second
derivative uses the rule, too.

Files: `apply.py` for one call of an op, `graphs.py` for the operation that holds a rule in a graph,
`tapes.py` for recording, `variables.py` for the variables that a function reads, `programs.py` for functions
that TensorFlow traces, `tensors.py`, `gradients.py` for `grad` and `vjp`, and `maps.py` for `vmap`.
"""

from multigrad.backend.defaults import *
from multigrad.backend.tensorflow.apply import apply
from multigrad.backend.tensorflow.gradients import reshape, solve, value_and_grad, vjp
from multigrad.backend.tensorflow.gradients import vjp as vjp_at_once
from multigrad.backend.tensorflow.host_call import host_call, opaque_to_compiler
from multigrad.backend.tensorflow.jit import jit
from multigrad.backend.tensorflow.maps import depends_on_element, map_rows, vmap
from multigrad.backend.tensorflow.programs import (
    compile_function,
    operations,
    update_wrapper,
    without_compilation,
)
from multigrad.backend.tensorflow.tapes import may_record
from multigrad.backend.tensorflow.tensors import (
    CONVERTIBLE,
    FOREIGN,
    TENSORS,
    as_tensor,
    concrete,
    conform,
    is_compiling,
    is_differentiable,
    library_code,
    observe,
    sizes,
    specs_of,
    trace_level,
    watch,
)
from multigrad.backend.tensorflow.variables import extend_pinned, extend_reads

TRACES_ONCE = True
jvp = transposed(vjp)
