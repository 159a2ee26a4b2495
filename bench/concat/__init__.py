"""Concatenation of channels beside torch: works, launches, times."""
