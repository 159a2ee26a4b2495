"""Constants of the predicted times, fitted to measured tiles of an H100.

``python -m bench tiles --fit`` prints them. What differs for weight gradients is the
cost of a program, a step and a result; the rest is the same hardware.
"""

from dataclasses import replace

from .time_model import TimeModel

FORWARD = TimeModel(
    efficiency=0.986,
    narrow=0.0856,
    eight_warps=1.12,
    sharing=1.01,
    step_cycles=97.6,
    latency_cycles=2240.0,
    miss_cycles=1360.0,
    l2_bytes=82.5,
    l2_miss_bytes=72.0,
    fill_cycles=3730.0,
    stage_cycles=239.0,
    store_cycles=0.0982,
    memory=0.859,
    reread=0.0375,
    launch_s=1.06e-06,
    split_s=2.05e-06,
    split_memory=1.21,
)
"""Of the forward pass and the input gradient."""
WEIGHT_GRADIENT = replace(
    FORWARD,
    step_cycles=291.0,
    fill_cycles=3330.0,
    store_cycles=0.0696,
    reread=0.111,
)
