"""Planted faults in a copy of the package, and the fast tests that find them.

    python tests/planted_faults.py          # every fault
    python tests/planted_faults.py jax      # faults on some backends

Each fault replaces a text of the package. It is found if tests fail that pass on the unchanged copy. The
program fails if a fault is not found, or if its text does not occur exactly once in the file. A change of the
package must update the faults whose text it changes.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent


class Fault(NamedTuple):
    """A text in a file of the package, its replacement, and the tests that should find the fault."""

    name: str
    backend: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    Fault(
        "narrow intermediate results are not found", "torch", "testing/precision.py",
        "EPSILON[wide] < EPSILON[dtype]",
        "EPSILON[wide] > EPSILON[dtype]",
        "test_gradient_checks.py::test_the_precision_of_a_function",
    ),
    Fault(
        "terms that cancel have no rounding error", "torch", "testing/differences.py",
        "max(size, self.terms)",
        "size",
        "test_gradient_checks.py::test_second_derivatives_whose_terms_cancel",
    ),
    Fault(
        "the second order is lost on JAX", "jax", "backend/jax/gradients.py",
        "return answer, conjugate(gradients)",
        "return answer, jax.lax.stop_gradient(conjugate(gradients))",
        "test_order.py::test_a_hessian_vector_product_over_two_arguments "
        "test_order.py::test_mixed_derivatives",
    ),
    Fault(
        "an input is taken for its stop_gradient", "jax", "backend/jax/primitives.py",
        "is_differentiated = self.order > 1",
        "is_differentiated = self.order > 9",
        "test_as_hand_written.py",
    ),
    Fault(
        "the second order is lost on TensorFlow", "tensorflow", "backend/tensorflow/gradients.py",
        "return tf.convert_to_tensor(tf.add_n(parts) if parts else tf.zeros_like(source))",
        "return tf.stop_gradient(tf.add_n(parts) if parts else tf.zeros_like(source))",
        "test_order.py::test_a_hessian_vector_product_over_two_arguments "
        "test_order.py::test_mixed_derivatives",
    ),
    Fault(
        "the second order is lost on PyTorch", "torch", "backend/torch/gradients.py",
        "_backward(value, inputs, create_graph=recorded, materialize_grads=True)",
        "_backward(value, inputs, retain_graph=True, materialize_grads=True)",
        "test_order.py::test_a_hessian_vector_product_over_two_arguments "
        "test_order.py::test_mixed_derivatives",
    ),
    Fault(
        "two arguments have each other's gradient", "torch", "core/answer.py",
        "entries = answer if type(answer) in _SEQUENCES",
        "entries = answer[::-1] if type(answer) in _SEQUENCES",
        "test_order.py::test_mixed_derivatives test_jacobian.py",
    ),
    Fault(
        "a gradient is not cast", "jax", "core/answer.py",
        "if (gradient.shape, gradient.dtype, gradient.device if _DEVICES else None) == spec:",
        "if gradient.shape == spec[0]:",
        "test_answers.py::test_a_gradient_has_the_dtype_of_its_argument",
    ),
    Fault(
        "a broadcast gradient is averaged", "jax", "backend/jax/tensors.py",
        "gradient = gradient.sum(axes).reshape(shape)",
        "gradient = gradient.mean(axes).reshape(shape)",
        "test_answers.py::test_broadcast_gradients_are_summed",
    ),
    Fault(
        "a broadcast gradient is summed over the wrong axes", "tensorflow", "backend/tensorflow/tensors.py",
        "gradient = tf.reshape(tf.reduce_sum(gradient, axes), shape)",
        "gradient = tf.reshape(tf.reshape(gradient, [-1])[: shape.num_elements()], shape)",
        "test_answers.py::test_broadcast_gradients_are_summed",
    ),
    Fault(
        "the second variable is dropped", "tensorflow", "core/variables.py",
        "if id(variable) not in self._dtypes:",
        "if not self._dtypes:",
        "test_variables.py::test_linear_poly test_variables.py::test_a_rule_without_variables_raises",
    ),
    Fault(
        "a rule reads later values of other variables", "torch", "core/variables.py",
        "scope = _RuleScope(variables, values[: len(variables)], outer_scope, name)",
        "scope = _RuleScope(variables, values[: len(variables)], None, name)",
        "test_variables.py::test_a_rule_runs_after_the_scope_of_its_values_has_ended",
    ),
    Fault(
        "a rule reads later values of its variables", "tensorflow", "core/variables.py",
        "scope = _RuleScope(variables, values[: len(variables)], outer_scope, name)",
        "scope = _RuleScope((), (), outer_scope, name)",
        "test_variables.py::test_inside_the_rule_a_variable_has_the_value_of_the_forward_pass",
    ),
    Fault(
        "every gradient is kept forever", "torch", "core/answer.py",
        "    entries: Sequence[Any] | None\n",
        "    entries: Sequence[Any] | None\n    read.__dict__.setdefault('kept', []).append(answer)\n",
        "test_memory.py",
    ),
    Fault(
        "a rule is called twice", "jax", "core/call.py",
        "return rule(upstream[0])",
        "return [rule(upstream[0]), rule(upstream[0])][0]",
        "test_calculus.py::test_number_of_runs_of_the_function_and_the_rule test_counts.py",
    ),
    Fault(
        "a complex gradient is not conjugated", "jax", "backend/jax/gradients.py",
        "return answer, conjugate(gradients)",
        "return answer, list(gradients)",
        "test_dtypes.py test_testing.py::test_the_conjugate_of_a_complex_gradient",
    ),
    Fault(
        "a gradient of the wrong shape is accepted", "torch", "core/answer.py",
        "if not _is_broadcast(",
        "if not gradient.shape and not _is_broadcast(",
        "test_errors.py",
    ),
    Fault(
        "a rule that is not linear is accepted", "tensorflow", "testing/gradient_check.py",
        "check_linear(flat, tolerance, next_noise)",
        "pass",
        "test_testing.py::test_a_nonlinear_rule",
    ),
    Fault(
        "a pullback can be called only once", "torch", "backend/torch/gradients.py",
        "retain_graph=True,",
        "retain_graph=False,",
        "test_calculus.py::test_vjp test_jacobian.py",
    ),
    Fault(
        "an argument that is not used has no gradient", "tensorflow", "backend/tensorflow/gradients.py",
        "tf.add_n(parts) if parts else tf.zeros_like(source)",
        "tf.add_n(parts)",
        "test_calculus.py::test_unused_arguments_have_zero_gradients",
    ),
    Fault(
        "a rule gets the wrong arguments of the op", "jax", "core/rule.py",
        "counts = (binding.passed, binding.positional)",
        "counts = (binding.positional, binding.passed)",
        "test_forms.py",
    ),
    Fault(
        "vmap ignores out_axes", "torch", "calculus/mapping.py",
        'return _move(tensor, 0, _in_range(self._name, "out_axes", axis, tensor))',
        "return tensor",
        "test_mapping.py::test_axes",
    ),
    Fault(
        "vmap drops assignments", "jax", "calculus/mapping.py",
        "backend.active.assign(variable, value)",
        "pass",
        "test_mapping.py::test_assignments_and_random_numbers",
    ),
    Fault(
        "the right side of an equation has no gradient", "torch", "ops/implicit_equations.py",
        "return [*super().parameters_at(z), *self.right]",
        "return [*super().parameters_at(z), *map(ops.stop_gradient, self.right)]",
        "ops/test_large_equations.py::test_the_gradient_of_a_linear_equation",
    ),
    Fault(
        "the second derivative of a solution is lost", "tensorflow", "ops/implicit_equations.py",
        "w = _tie(adjoint, solved, adjoint_parameters, adjoint_hidden)",
        "w = solved",
        "ops/test_large_equations.py::test_the_second_derivative_of_a_linear_equation",
    ),
    Fault(
        "the tensors of a minimized function are not found", "jax", "ops/implicit.py",
        "return solution(newton, slope, x0, args, minimizer)",
        "return solution(newton, grad(f), x0, args, minimizer)",
        "ops/test_large_equations.py"
        "::test_the_second_derivative_of_a_minimum_by_a_tensor_that_the_function_closes_over",
    ),
    Fault(
        "a reduced loss ignores its upstream gradient", "torch", "ops/linear_cross_entropy.py",
        'factor = upstream * known["largest"]',
        'factor = known["largest"]',
        "ops/test_linear_cross_entropy.py::test_gradients_of_reduced_losses",
    ),
    Fault(
        "a reduced loss has the wrong gradient for its weights", "jax", "ops/linear_cross_entropy.py",
        'return {"weights": upstream * losses}',
        'return {"weights": losses}',
        "ops/test_linear_cross_entropy.py::test_gradients_of_reduced_losses",
    ),
    Fault(
        "a tap changes the gradient", "torch", "callbacks/taps.py",
        "        return upstream\n",
        "        return 2.0 * upstream\n",
        "test_gradient_logger.py::test_the_numbers_are_those_of_eager_code_and_the_weights_are_the_same",
    ),
    Fault(
        "a tap in a compiled step changes the gradient", "jax", "callbacks/taps.py",
        "return x, lambda upstream: (upstream, statistics(upstream))",
        "return x, lambda upstream: (2.0 * upstream, statistics(upstream))",
        "test_gradient_logger.py::test_the_numbers_are_those_of_eager_code_and_the_weights_are_the_same",
    ),
    Fault(
        "clip has no gradient at its bound", "tensorflow", "ops/fixed/elementwise.py",
        "ops.greater(x, high)",
        "ops.greater_equal(x, high)",
        "ops/test_fixed.py::test_derivatives",
    ),
    Fault(
        "hypot is not fixed at infinity", "torch", "ops/fixed/elementwise.py",
        "of_a, of_b = ops.isinf(a), ops.isinf(b)",
        "of_a, of_b = ops.isnan(a), ops.isnan(b)",
        "ops/test_fixed.py::test_derivatives",
    ),
]  # fmt: skip


def copy_project(folder: Path) -> None:
    for part in ("multigrad", "tests", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def failed(folder: Path, backend: str, tests: str) -> list[str]:
    """Run fast tests on a copy of the project, and return the names of failed tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *[f"tests/{name}" for name in tests.split()]],
        cwd=folder,
        env=os.environ | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):  # for example, a file that cannot be imported
        raise RuntimeError(f"the tests of {tests} did not run on {backend}:\n{done.stdout}{done.stderr}")
    found = re.findall(r"^FAILED tests/\S*?(\w+\.py::\w+)", done.stdout, re.MULTILINE)
    assert bool(found) == bool(done.returncode), done.stdout
    return list(dict.fromkeys(found))


def problems(folder: Path, faults: list[Fault]) -> Iterator[str]:
    """Plant one fault after the other, print the tests that find it, and yield a message for each problem."""
    for backend in dict.fromkeys(fault.backend for fault in faults):
        own = " ".join(fault.tests for fault in faults if fault.backend == backend)
        names = failed(folder, backend, " ".join(dict.fromkeys(own.split())))
        if names:
            yield f"{backend}: {', '.join(names)} fail without a fault"
    for fault in faults:
        file = folder / "multigrad" / fault.file
        source = file.read_text()
        if source.count(fault.old) != 1:
            yield f"{fault.name}: its text is in {fault.file} {source.count(fault.old)} times"
            continue
        file.write_text(source.replace(fault.old, fault.new))
        try:
            names = failed(folder, fault.backend, fault.tests)
        finally:
            file.write_text(source)
        print(f"{fault.backend:<11} {fault.name:<52} {len(names):>3}  {', '.join(names[:3])}", flush=True)
        if not names:
            yield f"{fault.name}: none of {fault.tests} finds it on {fault.backend}"


def main(backends: list[str]) -> int:
    faults = [fault for fault in FAULTS if not backends or fault.backend in backends]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        print(f"{'backend':<11} {'fault':<52} tests that fail")
        found = list(problems(folder, faults))
    for problem in found:
        print(f"wrong: {problem}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
