"""Split models from one process."""
