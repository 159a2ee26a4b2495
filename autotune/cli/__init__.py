"""The commands of ``hetconv``, their tables and pictures."""
