"""Timed operators and links, and the models of devices that are fitted to them."""
