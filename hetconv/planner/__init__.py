"""Planner: finds the plan of least predicted step time for a graph on a cluster."""
