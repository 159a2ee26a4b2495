"""All that needs a GPU, as stages: tests and benchmarks in processes of their own."""
