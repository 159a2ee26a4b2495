"""Tests, in folders named after the rooms that they test; what several of them share
stands here.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
