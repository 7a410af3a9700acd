"""Solutions of equations, and their derivatives without the iterations of the solver."""
