"""Models: split layers, what happens around their forward, checkpoints and state."""
