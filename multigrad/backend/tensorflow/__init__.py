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

from multigrad.backend.base import Backend
from multigrad.backend.tensorflow import gradients, maps, programs, tapes, tensors, variables
from multigrad.backend.tensorflow.apply import apply
from multigrad.backend.tensorflow.host_call import host_call, opaque_to_compiler
from multigrad.backend.tensorflow.jit import jit


class TensorFlowBackend(Backend):
    """The implementation for TensorFlow."""

    TENSORS = tensors.TENSORS
    CONVERTIBLE = tensors.CONVERTIBLE
    FOREIGN = tensors.FOREIGN
    TRACES_ONCE = True
    apply = staticmethod(apply)
    value_and_grad = staticmethod(gradients.value_and_grad)
    vjp = staticmethod(gradients.vjp)
    solve = staticmethod(gradients.solve)
    reshape = staticmethod(gradients.reshape)
    vmap = staticmethod(maps.vmap)
    depends_on_element = staticmethod(maps.depends_on_element)
    is_differentiable = staticmethod(tensors.is_differentiable)
    specs_of = staticmethod(tensors.specs_of)
    conform = staticmethod(tensors.conform)
    concrete = staticmethod(tensors.concrete)
    observe = staticmethod(tensors.observe)
    watch = staticmethod(tensors.watch)
    may_record = staticmethod(tapes.may_record)
    compile_function = staticmethod(programs.compile_function)
    is_compiling = staticmethod(tensors.is_compiling)
    host_call = staticmethod(host_call)
    opaque_to_compiler = staticmethod(opaque_to_compiler)
    trace_level = staticmethod(tensors.trace_level)
    jit = staticmethod(jit)
    operations = staticmethod(programs.operations)
    extend_reads = staticmethod(variables.extend_reads)
    extend_pinned = staticmethod(variables.extend_pinned)
    library_code = staticmethod(tensors.library_code)
    update_wrapper = staticmethod(programs.update_wrapper)
    as_tensor = staticmethod(tensors.as_tensor)
    sizes = staticmethod(tensors.sizes)
    without_compilation = staticmethod(programs.without_compilation)


ACTIVE = TensorFlowBackend()
