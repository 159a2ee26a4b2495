"""Libraries whose models are split, imported once by the process that ranks are forked from.

Each rank would take ten seconds to import them.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings

LIBRARIES = (
    "torchvision",
    "timm",
    "transformers.models.resnet.modeling_resnet",
    "transformers.models.convnext.modeling_convnext",
    "transformers.models.regnet.modeling_regnet",
    "transformers.models.mobilenet_v2.modeling_mobilenet_v2",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d",
    "monai.networks.nets",
    "transformers.trainer",
    "lightning.fabric",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # tests without it are skipped
            importlib.import_module(name)
