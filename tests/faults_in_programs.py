"""Faults that this package once had, and the number of random programs until each is found.

    python tests/faults_in_programs.py                  # on the active backend
    python tests/faults_in_programs.py residual cast    # the faults whose names contain one of these words

Each fault is planted in a copy of the package, as by `planted_faults.py`. The program fails if one of them is
not found by the first 200 programs. A run takes about a minute for each fault that is found late.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from planted_faults import copy_project

MOST = 200


class Fault(NamedTuple):
    """A text in a file of the package, and the text that replaces it."""

    name: str
    backends: str
    file: str
    old: str
    new: str


ALL = "jax torch tensorflow"
FAULTS = [
    Fault(
        "two inputs that are one array are confused", "torch", "backend/torch/gradients.py",
        "return [t.clone() if t.requires_grad else t.detach().requires_grad_() for t in tensors]",
        "made = {id(t): t.clone() if t.requires_grad else t.detach().requires_grad_() for t in tensors}\n"
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
        "two inputs that are one array are confused", "jax", "backend/jax/primitives.py",
        "return [other_object(array) for array in arrays]",
        "return list(arrays)",
    ),
    Fault(
        "a function is differentiated although its rule needs no intermediate", "torch",
        "backend/torch/eager.py",
        "computed, count = False, len(inputs)",
        "computed, count = True, len(inputs)",
    ),
    Fault(
        "a function is differentiated although its rule needs no intermediate", "jax",
        "backend/jax/residuals.py",
        "    known, others =",
        "    return True\n    known, others =",
    ),
    Fault(
        "a compiled function loses its second derivative", "jax", "backend/jax/apply.py",
        "    if order > 1 or strip.in_program:",
        "    if order > 1:",
    ),
    Fault(
        "an intermediate has no second derivative", "torch", "backend/torch/eager.py",
        "computed = computed or FLOATING[residual.dtype]",
        "pass",
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
        "a rule that returns nothing has zero gradients", ALL, "core/call.py",
        "            if answer is None:\n                raise self._no_answer()\n",
        "            if answer is None:\n                return [None] * len(specs)\n",
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
        "flat upstream gradients have the order of the structure's reverse", ALL, "core/call.py",
        "return rule(*upstream, **more)",
        "return rule(*upstream[::-1], **more)",
    ),
    Fault(
        "a rule gets the arguments of the op in another order", ALL, "core/call.py",
        "rule = functools.partial(rule, *arguments[: arguments_for(name, original_rule, binding)])",
        "rule = functools.partial(rule, *arguments[: arguments_for(name, original_rule, binding)][::-1])",
    ),
    Fault(
        "residuals that are one tensor are saved once or twice", "torch", "backend/torch/eager.py",
        "if len(residuals) > 1:",
        "if type(run.template) is not tuple:",
    ),
    Fault(
        "two entries of a rule are exchanged", ALL, "core/answer.py",
        "entries = answer if type(answer) in _SEQUENCES and",
        "entries = answer[::-1] if type(answer) in _SEQUENCES and",
    ),
    Fault(
        "a lazy entry is zero", ALL, "core/answer.py",
        "gradient = gradient.gradient(index)",
        "gradient = None",
    ),
    Fault(
        "an entry of None is the entry before it", ALL, "core/answer.py",
        "        if entry is None:\n            return\n        is_tensor",
        "        if entry is None:\n"
        "            reading.update({template: v for v in [*reading.values()][-1:]}"
        " if type(template) is Slot else {})\n            return\n        is_tensor",
    ),
    Fault(
        "a rule reads the values that variables have in the backward pass", ALL, "core/call.py",
        "scope = self.scope_of(rule) if",
        "scope = ReadOnly() if",
    ),
    Fault(
        "a lazy gradient reads a variable outside of the scope of its rule", ALL, "core/call.py",
        "            answer = self._answer(rule, upstream, specs)\n",
        "            answer = self._answer(rule, upstream, specs)\n        with contextlib.nullcontext():\n",
    ),
    Fault(
        "the second weight is dropped", ALL, "core/variables.py",
        "if id(variable) not in self._dtypes:",
        "if not self._dtypes:",
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
        "forward mode does not transpose", ALL, "calculus/derivatives.py",
        "tangent = transpose(directions)",
        "tangent = [ops.sum(d) * u for d, u in zip(directions[:1] * len(ones), ones, strict=True)]",
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
        "an input is taken for its stop_gradient", "jax", "backend/jax/primitives.py",
        "is_wrapped = is_differentiated and not TRACERS[type(result)]",
        "is_wrapped = False",
    ),
]  # fmt: skip


def main(backend: str, words: list[str]) -> int:
    """Plant each fault of a backend, and print the number of programs after which it is found.

    Without words, the programs also run on the unchanged copy, where none may fail.
    """
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        for fault in [Fault("no fault", ALL, "core/call.py", "", ""), *FAULTS]:
            if backend not in fault.backends.split() or (words and not any(w in fault.name for w in words)):
                continue
            file = folder / "multigrad" / fault.file
            source = file.read_text()
            if fault.old and source.count(fault.old) != 1:
                missed += 1
                print(
                    f"{backend:<11} {fault.name:<72} its text is there {source.count(fault.old)} times",
                    flush=True,
                )
                continue
            file.write_text(source.replace(fault.old, fault.new) if fault.old else source)
            try:
                found = programs_until_found(folder, backend)
            finally:
                file.write_text(source)
            missed += (found is None) is (fault.name != "no fault")
            print(f"{backend:<11} {fault.name:<72} {'not found' if found is None else found}", flush=True)
    return bool(missed)


def programs_until_found(folder: Path, backend: str) -> int | None:
    """Return the number of programs that a process runs until one fails."""
    path = os.pathsep.join(map(str, [folder, folder / "tests", folder / "tests/transforms"]))
    environment = os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "faults_in_programs", "--run"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("after "):
        raise RuntimeError(f"the programs did not run:\n{done.stdout}{done.stderr}")
    number = done.stdout.split()[1]
    return None if number == "all" else int(number)


def run_programs() -> None:
    """Run programs until one fails, and print their number."""
    from test_random_programs import check, check_forgetful, drawn

    for number in range(MOST):
        text = drawn(number, 1)[f"seed {number}"]
        try:
            check(text)
            check_forgetful(text)
        except BaseException as error:  # noqa: BLE001 - pytest.raises fails by an exception of its own
            print(f"after {number + 1}", type(error).__name__, str(error)[:200])
            return
    print("after all")


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        run_programs()
    else:
        sys.exit(main(os.environ["KERAS_BACKEND"], sys.argv[1:]))
