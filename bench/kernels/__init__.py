"""Convolution kernels beside cuDNN: cases, checks of results, times."""
