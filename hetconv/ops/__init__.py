"""Operators on shards.

Importing this package registers what a HetTensor does when a torch function is called on
it. A function in a table ``RUN`` runs one kind of operator. It is called with the call
as it was read, how it is sharded, the ranks, and torch's function with its arguments.
"""

from . import dispatch as dispatch
