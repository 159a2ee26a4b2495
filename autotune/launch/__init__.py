"""Local ranks, and devices that are slowed on purpose."""
