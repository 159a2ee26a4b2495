"""What programs do with a model, beyond calling it with one tensor."""
