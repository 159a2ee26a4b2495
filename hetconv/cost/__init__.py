"""Cost model: predicted seconds, sent bytes and memory of a plan."""
