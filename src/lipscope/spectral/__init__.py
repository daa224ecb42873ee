"""How it is measured: the operator protocol, the solvers, and results as intervals."""
