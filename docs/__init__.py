"""Pages of the documentation, and what generates parts of them."""
