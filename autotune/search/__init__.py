"""Tuning: studies of ratios and tiles, races of whole steps, and their journal."""
