"""Tests of who launches, and of what is decided once."""
