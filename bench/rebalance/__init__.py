"""Changes of the plan while devices change their speed."""
