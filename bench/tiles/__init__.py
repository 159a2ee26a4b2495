"""Every tile of chosen convolutions: its time, and the model of it that is fitted to these."""
