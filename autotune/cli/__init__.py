"""The commands of ``hetconv`` and their tables."""
