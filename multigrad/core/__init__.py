"""One call of an op: binding, structures, the rule and its answer, variables. No framework is imported here.

Begin with `multigrad/op.py`, then `call.py`. This file exports nothing.
"""
