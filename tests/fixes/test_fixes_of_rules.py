"""The errors about ops, rules and gradients: each fix works."""

import keras
import numpy as np
from fixing import Row, check
from keras import ops
from support import BACKEND, array

from multigrad import grad, op_custom_gradient

X = np.ones(3, "float32")
THREE = 3.0 * X


def rule_of(rule, name="op"):
    """Return the gradient of an op with this rule. The false factor of a right rule is 3."""
    return slope(op_custom_gradient(lambda x: (x * 2.0, rule), name=name))


def slope(op, *args):
    return grad(lambda x: ops.sum(op(x, *args)))(X)


def of_two(answer):
    op = op_custom_gradient(lambda x, n: (x * keras.ops.cast(n, x.dtype), answer))
    return slope(op, array(2, dtype="int32"))


@op_custom_gradient
def with_option(x, rate):
    return x * rate, lambda upstream: upstream * rate


def of_two_outputs(rule, outputs=2):
    op = op_custom_gradient(lambda x: ((x * 5.0,) * outputs, rule))
    return grad(lambda x: ops.sum(op(x)[0]) + ops.sum(op(x)[-1]))(X)


def of_pair(answer, number=2.0):
    op = op_custom_gradient(lambda pair, s: (pair[0] * pair[1], answer))
    return grad(lambda pair: op(pair, number))((3.0, 5.0))


def of_names(answer):
    op = op_custom_gradient(lambda x, /, **kw: (x * kw["x"], answer))
    return grad(lambda a: op(a, x=2.0))(3.0)


def of_weight(rule, weight):
    op = op_custom_gradient(lambda x: (x * weight, rule))
    return grad(lambda: ops.sum(op(X)), (), variables=[weight])()[1]


def weight(trainable=True):
    return keras.Variable(2.0, trainable=trainable, name="weight")


def seven_of(upstream, variables):
    return upstream, [7.0 * ops.sum(upstream)]


def of_number(rule):
    op = op_custom_gradient(lambda x, *, n: (x * 2.0, rule or (lambda x, upstream: upstream * n)))
    return grad(lambda x: ops.sum(op(x, n=3.0)))(X)


class Opaque(dict):
    """A container that keras.tree does not flatten."""


def assigning(counter, in_rule):
    def f(x):
        if not in_rule:
            counter.assign_add(1.0)

        def rule(upstream):
            if in_rule:
                counter.assign_add(1.0)
            return upstream * 3.0

        return x * 2.0, rule

    return slope(op_custom_gradient(f))


def adding_loss(inside):
    layer = keras.layers.Dense(1, activity_regularizer="l2", kernel_initializer="ones")
    layer.build((1, 3))
    layer.trainable = False

    def f(x):
        y = layer(x[None]) if inside else x * 2.0
        return y, lambda upstream: THREE * ops.sum(upstream) if inside else upstream * 3.0

    op = op_custom_gradient(f)
    return slope(lambda x: op(x) + (0.0 if inside else ops.stop_gradient(ops.sum(layer(x[None])))))


def sparse():
    if keras.backend.backend() == "jax":
        from jax.experimental import sparse

        return sparse.BCOO.fromdense(X)
    import tensorflow as tf

    return tf.sparse.from_dense(X)


def symbolic(is_argument):
    inner = keras.Input((3,))
    op = op_custom_gradient(lambda x, y=0.0: ((y if is_argument else inner) + x, lambda u: u))
    return op(inner, inner) if is_argument else op(array(1.0))


RULES = [
    Row("write @op_custom_gradient above the function", lambda: op_custom_gradient(3.0),
        lambda: op_custom_gradient(lambda x: x)),
    Row('write @op_custom_gradient(name="...")', lambda: op_custom_gradient(lambda x: x, name=3),
        lambda: op_custom_gradient(lambda x: x, name="three")),
    Row("end the function with `return output, rule`", lambda: slope(op_custom_gradient(lambda x: x * 2.0)),
        lambda: rule_of(lambda u: u * 3.0), THREE),
    Row("Put several outputs into a tuple, as in `return (a, b), rule`",
        lambda: slope(op_custom_gradient(lambda x: (x * 2.0, x * 5.0, lambda u: u))),
        lambda: of_two_outputs(lambda u1, u2: u1 + 2.0 * u2), THREE),
    Row("end the rule with `return gradient`", lambda: rule_of(lambda u: None),
        lambda: rule_of(lambda u: u * 3.0), THREE),
    Row("if the gradient is zero, write `return None,`", lambda: rule_of(lambda u: None),
        lambda: rule_of(lambda u: (None,)), 0.0 * X),
    Row("write `return gradients, [None for v in variables]`",
        lambda: of_weight(lambda u, variables: None, weight()),
        lambda: of_weight(lambda u, variables: (u, [None for v in variables]), weight()), [0.0]),
    Row("return both, with one entry per variable", lambda: of_weight(lambda u, variables: u, weight()),
        lambda: of_weight(seven_of, weight()), [21.0]),
    Row("one entry for each of `variables`, as in `[... for v in variables]`",
        lambda: of_weight(lambda u, variables: (u, [1.0, 2.0]), weight()),
        lambda: of_weight(lambda u, variables: (u, [7.0 for v in variables]), weight()), [7.0]),
    Row("write the rule as `def rule(upstream, variables)`", lambda: of_weight(lambda u: u, weight()),
        lambda: of_weight(seven_of, weight()), [21.0]),
    Row("did you mean `variables` instead of `variable`",
        lambda: of_weight(lambda upstream, variable=None: upstream, weight()),
        lambda: of_weight(lambda upstream, variables=None: (upstream, [7.0]), weight()), [7.0]),
    Row("did you mean `upstream` instead of `upsteam`? If not, write the rule in this form",
        lambda: rule_of(lambda x, *, upsteam: x * upsteam),
        lambda: rule_of(lambda x, *, upstream: upstream * 3.0), THREE),
    Row("rule(upstream), because the output is one tensor", lambda: rule_of(lambda a, b, c: a),
        lambda: rule_of(lambda upstream: upstream * 3.0), THREE),
    Row("rule(u1, u2), because the output has 2 tensors", lambda: of_two_outputs(lambda a, b, c: a),
        lambda: of_two_outputs(lambda u1, u2: u1 + 2.0 * u2), THREE),
    Row("or write `rule(u1, u2)`", lambda: of_two_outputs(lambda u: u),
        lambda: of_two_outputs(lambda u1, u2: u1 + 2.0 * u2), THREE),
    Row("or write `rule(u1, u2)`", lambda: of_two_outputs(lambda u: (u,)),
        lambda: of_two_outputs(lambda u1, u2: u1 + 2.0 * u2), THREE),
    Row("rule(*us), because the output has 7 tensors", lambda: of_two_outputs(lambda a, b: a, 7),
        lambda: of_two_outputs(lambda *us: us[0] + 2.0 * us[6], 7), THREE),
    Row("rule(x, n, *, upstream), because the op has 2 positional argument(s)",
        lambda: of_two(lambda x, upstream: upstream),
        lambda: of_two(lambda x, n, *, upstream: (upstream * 3.0, None)), THREE),
    Row("remove 'n' from the rule's parameters", lambda: of_number(lambda x, upstream, n=2.0: upstream * n),
        lambda: of_number(None), THREE),
    Row("return `output, rule` from the function", lambda: rule_of(type), lambda: rule_of(lambda u: u * 3.0),
        THREE),
    Row("return a dict from argument names", lambda: of_pair(lambda u: (None, u * 7.0)),
        lambda: of_pair(lambda u: {"pair": (None, u * 7.0)}), (0.0, 7.0)),
    Row("one element for each element of the argument", lambda: rule_of(lambda u: u[:2]),
        lambda: rule_of(lambda u: u * 3.0), THREE, ValueError),
    Row("if this is another axis. The op has 2 outputs",
        lambda: of_two_outputs(lambda u: ops.multiply(u, 3.0)),
        lambda: of_two_outputs(lambda u1, u2: u1 + 2.0 * u2), THREE, ValueError),
    Row("return the gradient with respect to this argument", lambda: rule_of(lambda u: "text"),
        lambda: rule_of(lambda u: u * 3.0), THREE),
    Row("return each gradient in the structure of its argument", lambda: of_two(lambda u: (u, u)),
        lambda: of_two(lambda u: (u * 3.0, None)), THREE),
    Row("return as many gradients as required, with None", lambda: of_two(lambda u: (u, None, None)),
        lambda: of_two(lambda u: (u * 3.0, None)), THREE),
    Row("or pass a constant by name", lambda: grad(with_option)(1.0, 3.0),
        lambda: grad(with_option)(1.0, rate=3.0), 3.0),
    Row("return one entry by the name of each differentiable argument", lambda: of_two(lambda u: {"y": u}),
        lambda: of_two(lambda u: {"x": u * 3.0}), THREE),
    Row("return a tuple, or rename one of the parameters", lambda: of_names(lambda u: {"x": u}),
        lambda: of_names(lambda u: (u * 3.0, None)), 3.0),
    Row("no others. Did you mean 'scale'?",
        lambda: op_custom_gradient(lambda x, *, scale: (x * scale, lambda u: u))(X, scales=3.0),
        lambda: op_custom_gradient(lambda x, *, scale: (x * scale, lambda u: u))(X, scale=3.0), THREE),
    Row("pass 'scale' by name, as in scale=...",
        lambda: op_custom_gradient(lambda x, *, scale: (x * scale, lambda u: u))(X, 3.0),
        lambda: op_custom_gradient(lambda x, *, scale: (x * scale, lambda u: u))(X, scale=3.0), THREE),
    Row("assign the variable, or draw the random number, in the function",
        lambda: assigning(weight(False), True), lambda: assigning(weight(False), False), THREE),
    Row("call the layer outside of the function", lambda: adding_loss(True), lambda: adding_loss(False),
        THREE),
    Row("put them into a plain container",
        lambda: op_custom_gradient(lambda d: (d["x"], lambda u: {"x": u}))(Opaque(x=array(X))),
        lambda: slope(lambda x: op_custom_gradient(lambda d: (d["x"],
        lambda u: {"d": {"x": u * 3.0}}))({"x": x})),
        THREE),
    Row("pass the symbolic tensor to the op as an argument", lambda: symbolic(False), lambda: symbolic(True)),
]  # fmt: skip

if BACKEND != "torch":  # PyTorch's sparse tensors have the class of the others
    RULES += [
        Row("pass its values as a dense tensor",
            lambda: op_custom_gradient(lambda x: (x, lambda u: u))(sparse()),
            lambda: slope(op_custom_gradient(lambda x: (x, lambda u: u * 3.0))), THREE),
    ]  # fmt: skip


def test_the_fixes_of_errors_about_rules():
    others = dict.fromkeys(("unusable", "require_function"), "in the other tables")
    others |= dict.fromkeys(("closed_over", "held"), "in tests/test_closed_over.py")
    check(RULES, ["core"], others)
