"""Last step of a kernel's launch: by Triton, or recorded where there is no GPU."""
