"""Settings of the whole suite."""

import torch
from hypothesis import settings

settings.register_profile("hetconv", deadline=None)
settings.load_profile("hetconv")
torch.set_num_threads(1)  # ranks are forked from here
