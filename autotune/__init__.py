"""Measuring a cluster and tuning splits on it; the command line. Stands on everything else."""
