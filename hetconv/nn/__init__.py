"""Parallelized models: split layers, calls, gradients, states and checkpoints."""
