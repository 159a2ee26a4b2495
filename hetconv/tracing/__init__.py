"""From one run of a model to a graph of operators."""
