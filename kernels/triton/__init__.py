"""Triton's kernels and their launches. A module here is imported when it is first used."""
