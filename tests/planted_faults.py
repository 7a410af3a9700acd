"""Faults of the package that no random change of `mutants.py` makes. Many of them it once had.

Each replaces a text that occurs once in its file, which a test checks: a change of this text must update it.
`python tests/mutants.py planted` plants them. Tests find some of them, and random programs the others.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A text in a file of the package, the text that replaces it, and the tests that find the fault."""

    name: str
    backends: str
    file: str
    old: str
    new: str
    tests: str = ""
    """Random programs find a fault without tests."""


ALL = "jax torch tensorflow"
FAULTS = [
    Fault(
        "terms that cancel have no rounding error", "torch", "testing/differences.py",
        "max(size, self.terms)",
        "size",
        "tests/test_gradient_checks.py::test_second_derivatives_whose_terms_cancel",
    ),
    Fault(
        "a rule reads later values of other variables", "torch", "core/rule.py",
        "return RuleScope(self.variables, scope_values, self.outer_scope, self.name)",
        "return RuleScope(self.variables, values, None, self.name)",
        "tests/test_variables.py::test_a_rule_runs_after_the_scope_of_its_values_has_ended",
    ),
    Fault(
        "every gradient is kept forever", "torch", "core/answer.py",
        "    entries: Sequence[Any] | None\n",
        "    entries: Sequence[Any] | None\n    read.__dict__.setdefault('kept', []).append(answer)\n",
        "tests/test_memory.py",
    ),
    Fault(
        "a rule is called twice", "jax", "core/rule.py",
        "return user_rule(upstream[0])",
        "return [user_rule(upstream[0]), user_rule(upstream[0])][0]",
        "tests/transforms/on_jax/test_jit.py::test_the_function_and_its_rule_are_traced_once",
    ),
    Fault(
        "a complex gradient is not conjugated", "jax", "backend/jax/gradients.py",
        "return answer, conjugate(gradients)",
        "return answer, list(gradients)",
        "tests/test_dtypes.py tests/test_testing.py::test_the_conjugate_of_a_complex_gradient",
    ),
    Fault(
        "a rule gets the wrong arguments of the op", "jax", "core/forms.py",
        "counts = (binding.passed, binding.positional)",
        "counts = (binding.positional, binding.passed)",
        "tests/test_forms.py",
    ),
    Fault(
        "the right side of an equation has no gradient", "torch", "ops/implicit/equations.py",
        "return [*super().parameters_at([ops.zeros_like(x) for x in z]), *self.right]",
        "return [*super().parameters_at(z), *map(ops.stop_gradient, self.right)]",
        "tests/ops/test_large_equations.py::test_the_gradient_of_a_linear_equation",
    ),
    Fault(
        "the second derivative of a solution is lost", "tensorflow", "ops/implicit/equations.py",
        "w = _tie(adjoint, solved, adjoint_parameters, adjoint_hidden)",
        "w = solved",
        "tests/ops/test_large_equations.py::test_the_second_derivative_of_a_linear_equation",
    ),
    Fault(
        "the tensors of a minimized function are not found", "jax", "ops/implicit/functions.py",
        "return solution(newton, slope, x0, args, minimizer)",
        "return solution(newton, grad(f), x0, args, minimizer)",
        "tests/ops/test_large_equations.py"
        "::test_the_second_derivative_of_a_minimum_by_a_tensor_that_the_function_closes_over",
    ),
    Fault(
        "a tap changes the gradient", "torch", "callbacks/taps.py",
        "        return upstream\n",
        "        return 2.0 * upstream\n",
        "tests/test_gradient_logger.py::test_the_numbers_are_those_of_eager_code_and_the_weights_are_the_same",
    ),
    Fault(
        "a tap in a compiled step changes the gradient", "jax", "callbacks/taps.py",
        "return x, lambda upstream: (upstream, statistics(upstream))",
        "return x, lambda upstream: (2.0 * upstream, statistics(upstream))",
        "tests/test_gradient_logger.py::test_the_numbers_are_those_of_eager_code_and_the_weights_are_the_same",
    ),
    Fault(
        "clip has no gradient at its bound", "tensorflow", "ops/fixed/elementwise.py",
        "ops.greater(x, high)",
        "ops.greater_equal(x, high)",
        "tests/ops/test_fixed.py::test_the_audit_finds_no_fault",
    ),
    # Found by random programs.
    Fault(
        "two inputs that are one array are confused", "torch", "backend/torch/gradients.py",
        "return [copy(t) if t.requires_grad else t.detach().requires_grad_() for t, copy in pairs]",
        "made = {id(t): copy(t) if t.requires_grad else t.detach().requires_grad_() for t, copy in pairs}\n"
        "        return [made[id(t)] for t in tensors]",
    ),
    Fault(
        "two inputs that are one array are confused", "tensorflow",
        "backend/tensorflow/gradients.py",
        "sources = [tf.identity(tensor) for tensor in tensors]\n    stored = _stored_variables(variables)\n"
        "    with tf.GradientTape(watch_accessed_variables=False) as tape:",
        "made = {id(tensor): tf.identity(tensor) for tensor in tensors}\n"
        "    sources = [made[id(tensor)] for tensor in tensors]\n    stored = _stored_variables(variables)\n"
        "    with tf.GradientTape(watch_accessed_variables=False) as tape:",
    ),
    Fault(
        "two inputs that are one array are confused", "jax", "backend/jax/strip.py",
        "return [private.other_object(array) for array in arrays]",
        "return list(arrays)",
    ),
    Fault(
        "a function is differentiated although its rule needs no intermediate", "jax",
        "backend/jax/residuals.py",
        "    known, others =",
        "    return True\n    known, others =",
    ),
    Fault(
        "an intermediate has no second derivative", "jax", "backend/jax/apply.py",
        "run = first.rerun_with_tangents()",
        "pass",
    ),
    Fault(
        "an intermediate has no second derivative", "tensorflow", "backend/tensorflow/apply.py",
        "residuals = run.residuals_with(inputs, tied_outputs)",
        "residuals = [tf.stop_gradient(r) if o == -1 else r\n"
        "                 for r, o in zip(run.residuals_with(inputs, tied_outputs), run.roles, strict=True)]",
    ),
    Fault(
        "a residual that is an output is taken for an intermediate", ALL, "common/closure.py",
        "    for role, tensor in enumerate(outputs, len(inputs)):\n"
        "        roles.setdefault(id(tensor), role)\n",
        "",
    ),
    Fault(
        "an output that is an input is taken for the output", ALL, "common/closure.py",
        "    for role, tensor in enumerate(inputs):\n        roles.setdefault(id(tensor), role)\n"
        "    for role, tensor in enumerate(outputs, len(inputs)):\n"
        "        roles.setdefault(id(tensor), role)",
        "    for role, tensor in enumerate((*inputs, *outputs)):\n        roles[id(tensor)] = role",
    ),
    Fault(
        "a residual is taken for its neighbor", "jax tensorflow", "common/closure.py",
        "return [roles.get(id(residual), OTHER) for residual in residuals]",
        "found = [roles.get(id(residual), OTHER) for residual in residuals]\n"
        "    return [1 - r if r in (0, 1) and len(inputs) == 2 else r for r in found]",
    ),
    Fault(
        "a gradient is not cast", "jax tensorflow", "core/answer.py",
        "return framework.conform(gradient, spec)",
        "return framework.conform(gradient, (spec[0], gradient.dtype, spec[2]))",
    ),
    Fault(
        "a broadcast gradient is summed over the wrong axes", "jax", "backend/jax/tensors.py",
        "gradient = gradient.sum(axes).reshape(shape)",
        "gradient = gradient.ravel()[: int(np.prod(shape))].reshape(shape)",
    ),
    Fault(
        "a broadcast gradient is summed over the wrong axes", "torch", "backend/torch/tensors.py",
        "gradient = gradient.sum_to_size(shape)",
        "gradient = gradient.flatten()[: shape.numel()].reshape(shape)",
    ),
    Fault(
        "a broadcast gradient is summed over the wrong axes", "tensorflow", "backend/tensorflow/tensors.py",
        "gradient = tf.reshape(tf.reduce_sum(gradient, axes), shape)",
        "gradient = tf.reshape(tf.reshape(gradient, [-1])[: shape.num_elements()], shape)",
    ),
    Fault(
        "an argument without a gradient shifts the gradients", ALL, "core/answer.py",
        "for pairs in (named, without_self, differentiable):",
        "for pairs in (differentiable + [p for p in named if p not in differentiable],):",
    ),
    Fault(
        "the gradients of named arguments are read by position", ALL, "core/answer.py",
        "yield [(*pair, answer.get(name)) for name, pair in by_name.items()]",
        "yield [(*pair, entry) for pair, entry in zip(by_name.values(), answer.values(), strict=False)]",
    ),
    Fault(
        "a rule gets the arguments of the op in another order", ALL, "core/call.py",
        "user_rule = functools.partial(user_rule, *arguments[:count])",
        "user_rule = functools.partial(user_rule, *arguments[:count][::-1])",
    ),
    Fault(
        "a rule reads the values that variables have in the backward pass", ALL, "core/rule.py",
        "scope = self.scope_of(scope_values) if",
        "scope = ReadOnly() if",
    ),
    Fault(
        "a lazy gradient reads a variable outside of the scope of its rule", ALL, "core/rule.py",
        "            answer = self._answer(user_rule, upstream)\n",
        "            answer = self._answer(user_rule, upstream)\n        with contextlib.nullcontext():\n",
    ),
    Fault(
        "the second order is lost", "jax", "backend/jax/gradients.py",
        "return answer, conjugate(gradients)",
        "return answer, jax.lax.stop_gradient(conjugate(gradients))",
    ),
    Fault(
        "the second order is lost", "tensorflow", "backend/tensorflow/gradients.py",
        "return tf.convert_to_tensor(tf.add_n(parts) if parts else tf.zeros_like(source))",
        "return tf.stop_gradient(tf.add_n(parts) if parts else tf.zeros_like(source))",
    ),
    Fault(
        "the second order is lost", "torch", "backend/torch/gradients.py",
        "create_graph=recorded, materialize_grads=True",
        "materialize_grads=True",
    ),
    Fault(
        "forward mode does not transpose", "torch tensorflow", "backend/defaults.py",
        "return result, transpose(tangents)",
        "return result, [keras.ops.sum(tangents[0]) * u for u in ones]",
    ),
    Fault(
        "a third derivative is lost", "torch", "backend/torch/gradients.py",
        "recorded = recording and (depth > 0 or _depends_on_others(value, [*inputs, *weights]))",
        "recorded = recording and depth < 2 and (\n"
        "            depth > 0 or _depends_on_others(value, [*inputs, *weights]))",
    ),
    Fault(
        "a closed-over tensor has the gradient zero, without an error", ALL, "core/call.py",
        "return outer is not None and all(",
        "return True or all(",
    ),
    Fault(
        "an input is taken for its stop_gradient", "jax", "backend/jax/strip.py",
        "is_wrapped = is_differentiated and not TRACERS[type(result)]",
        "is_wrapped = False",
    ),
]  # fmt: skip
