"""Imported by each Python that a snippet starts: see `bench.shared.torchvision_operators`."""

from bench.shared.torchvision_operators import declare_operators

declare_operators()
