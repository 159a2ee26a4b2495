"""Operators on shards.

Importing this package registers the dispatcher that runs torch functions on HetTensors.
"""

from . import dispatch as dispatch
