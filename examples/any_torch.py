"""Lets torchvision be imported in this checkout, where it may be built for another torch.

diffusers, Lightning, timm and transformers import it. A program of yours does without this.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.shared.torchvision_operators import declare_operators

declare_operators()
