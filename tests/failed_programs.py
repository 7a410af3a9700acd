"""Random programs that once failed, made smaller. The fast run includes them.

A program is kept as text, because the generator draws other programs for the same seeds when it changes.
"""

FAILED = {
    # JAX: the gradients of a weight and of an input were exchanged.
    "a weight holds the array of the input of a layer": """
x0 = array(0.1, 0.5, 1.1)
w0 = Variable(-1.14, 0.63, 1.08)
w0.assign(x0)

class Class0(Layer):
    def __init__(self):
        super().__init__()
        self.w0 = w0

    @op_custom_gradient
    def call(self, a):
        y0 = a * self.w0

        def rule(u0, variables):
            return 2.0 * u0 * self.w0, [3.0 * u0 * a]
        return y0, rule

op0 = Class0()

def loss(x0):
    return ops.sum(op0(x0))

result = derivatives(loss, [x0], [0], [w0], modes=["grad", "grad"], compiled=False)
""",
    "a weight holds the array of the input of a function": """
x0 = array(-1.16, -0.46, -0.29)
w0 = Variable(-0.89, -0.74, -0.13)
w0.assign(x0)

@op_custom_gradient
def op0(a, b):
    s0 = w0 * 1.3
    y0 = 1.3 * b

    def rule(u0, variables):
        return (-3.0 * u0 * s0, 0.5 * u0 * b), [1.5 * u0 * a]
    return y0, rule

def loss(x0):
    return ops.sum(op0(op0(x0, x0), x0))

result = derivatives(loss, [x0], [0], [w0], modes=["grad", "grad"], compiled=False)
""",
    "two weights hold one array": """
x0 = array(-0.52, -1.12, -0.04)
w0 = Variable(0.58, -0.14, -1.02)
w1 = Variable(-1.03, -0.02, 0.04)
w1.assign(value_of(w0))

@op_custom_gradient
def op0(a):
    s0 = w0 * 0.5
    s1 = w1 * 1.3
    y0 = a * s0

    def rule(upstream, variables):
        return -3.0 * upstream * s1, [0.5 * upstream * a, 2.0 * upstream * s0]
    return y0, rule

def loss(x0):
    return ops.sum(op0(x0))

result = derivatives(loss, [x0], [0], [w0, w1], modes=["grad", "grad"], compiled=False)
""",
    # JAX: the gradients of the two inputs were exchanged.
    "two inputs of a method are one array": """
x0 = array(0.3, -0.8, 0.5)
x1 = x0
k = x0

class Class0:
    @op_custom_gradient
    def method(self, a, b):
        m0 = ops.sin(a * b)
        y0 = ops.sin(a) * m0

        def rule(u0):
            return 2.0 * u0 * b, -3.0 * u0 * a * m0
        return y0, rule

op0 = Class0().method

def loss(x0, x1):
    return ops.sum(op0(x0, k))

result = derivatives(loss, [x0, x1], [0], [], modes=["grad", "grad"], compiled=False)
""",
    # JAX: one of the two calls had the gradient of its input instead of that of its rule.
    "the output is an input, and the function reads a weight": """
x0 = array(-1.16, -0.46, -0.29)
w0 = Variable(-0.89, -0.74, -0.13)

@op_custom_gradient
def op0(a, b):
    s0 = w0 * 1.3
    y0 = b

    def rule(u0, variables):
        return (2.0 * u0, 3.0 * u0), [5.0 * u0]
    return y0, rule

def loss(x0):
    return ops.sum(op0(op0(x0, x0), x0))

result = derivatives(loss, [x0], [0], [], modes=["grad"], compiled=False)
""",
    # JAX raised an internal error.
    "vmap of a layer, with two inputs that are one array": """
x0 = array(-1.08, 0.08, 0.64)
x1 = x0

class Class0(Layer):
    @op_custom_gradient
    def call(self, a, b):
        y0 = 1.3 * a

        def rule(upstream):
            return 2.0 * upstream, -3.0 * upstream
        return y0, rule

op0 = Class0()

def loss(x0, x1):
    v0 = vmap(lambda p, q: op0(op0(q, q), p))(x1, x1)
    return ops.sum(v0)

result = derivatives(loss, [x0, x1], [1], [], modes=["grad", "grad"], compiled=False)
""",
    # PyTorch: the op in the checkpoint got each residual of the next one.
    "a checkpoint runs an op of one tensor again": """
x0 = array(-0.4, -0.25, 0.7)

@op_custom_gradient
def op0(a, b):
    y0 = ops.cos(a)

    def rule(u0):
        return 0.5 * u0 * a, 1.5 * u0 * b
    return y0, rule

def loss(x0):
    return ops.sum(checkpoint(lambda p: op0(op0(p, p), p))(x0))

result = derivatives(loss, [x0], [0], [], modes=["grad"], compiled=False)
""",
    # JAX: a lazy gradient read a weight outside of the scope of its rule, where it was a tracer of the loop.
    "a lazy gradient that reads a weight in a loop": """
x0 = array(-0.1875, 0.015625, -0.515625)
w0 = Variable(-0.671875, -0.390625, 0.15625)

@op_custom_gradient
def op0(a):
    s0 = w0 * -0.7
    y0 = s0 * a

    def rule(u0, variables):
        return (lambda: 2.0 * u0 * (w0 * s0)), [0.5 * u0 * (w0 * a)]
    return y0, rule

def loss(x0):
    return ops.sum(loop(lambda p: ops.sin(op0(p)))(x0))

result = derivatives(loss, [x0], [], [w0], modes=["grad", "grad"], compiled=False)
""",
    # JAX: the derivative of `keras.ops.abs` at zero is 1.
    "a second derivative of a spike at zero": """
x0 = array(-0.5, 0.0, 0.25)

def loss(x0):
    return ops.sum(ops.sin(shelf.spike(x0)))

result = derivatives(loss, [x0], [0], [], modes=["grad", "grad", "grad"], compiled=False)
""",
}
