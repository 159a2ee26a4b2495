"""Norms on shards: with the statistics of the whole where ranks share what is measured."""
