"""Rules that are and are not linear in the upstream gradient."""

from keras import ops

NOT_LINEAR = {
    "clipped": lambda u: ops.clip(u, -1.0, 1.0),
    "clipped far out": lambda u: ops.clip(u, -50.0, 50.0),
    "guided": ops.relu,
    "sign": ops.sign,
    "squared": lambda u: u * u,
    "with an offset": lambda u: u + 1.0,
    "of unit length": lambda u: u / ops.sqrt(ops.sum(u * u)),
}

LINEAR = {
    "guarded": lambda u: ops.where(u == 0.0, 0.0, 3.0 * u),
    "turned": lambda u: -7.0 * ops.flip(u),
    "centred": lambda u: u - ops.mean(u),
    "none": lambda u: (None,),
}
