"""Operators on shards. Importing this package registers what a HetTensor does when a
torch function is called on it.
"""

from . import dispatch as dispatch
