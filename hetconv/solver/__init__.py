"""The exact minimum of a factor graph, in plain numpy."""
