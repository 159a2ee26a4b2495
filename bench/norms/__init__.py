"""Norms by Triton: what is compiled of them, and what is timed against torch's."""
