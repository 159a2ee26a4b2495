"""Changes of the plan of a model that is in use."""
