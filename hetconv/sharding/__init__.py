"""Geometry in integers: boxes, layouts, splits and the rules of the layers that a plan names."""
