"""Changes of plans of models in use."""
