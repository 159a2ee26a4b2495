"""Watches of long waits: for ranks that are lost, and for ranks in different calls."""
