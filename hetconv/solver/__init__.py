"""Exact minimization of factor graphs, on plain numpy arrays."""
