"""From a model to a graph of operators, by one run on fake tensors."""
