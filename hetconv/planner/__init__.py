"""From a graph and a cluster profile to the plan with the least predicted step time."""
