"""Networks of public libraries with random weights, small enough for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from bench.shared.models import torchvision_model
from bench.shared.torchvision_operators import declare_operators
from hetconv.sharding.layout import Shape
from hetconv.sharding.split import SplitKind


@dataclass(frozen=True)
class Network:
    """A network and the input that it is measured on.

    Attributes:
        make: Makes the model.
        shape: Shape of its input.
        kind: How all its convolutions are split.
    """

    make: Callable[[], nn.Module]
    shape: Shape
    kind: SplitKind = "height"


class Denoiser(nn.Module):
    """A diffusion U-Net at one fixed time, so that it has one input."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x: Tensor) -> Tensor:
        """Returns the predicted noise."""
        y: Tensor = self.unet(x, 7).sample
        return y


def resnet18_group_norm() -> nn.Module:
    """ResNet-18 with group norms of 32 groups."""
    return torchvision_model("resnet18", norm_layer=partial(nn.GroupNorm, 32))


def timm_model(name: str) -> nn.Module:
    """Makes a model of timm."""
    declare_operators()
    import timm

    model: nn.Module = timm.create_model(name)
    return model


def unet_3d() -> nn.Module:
    """MONAI's residual U-Net of volumes, with instance norms."""
    from monai.networks.nets.unet import UNet

    model: nn.Module = UNet(3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2)
    return model


def segresnet() -> nn.Module:
    """MONAI's SegResNet of images, with its default blocks and group norms."""
    from monai.networks.nets.segresnet import SegResNet

    model: nn.Module = SegResNet(2, init_filters=16)
    return model


def vae_decoder() -> nn.Module:
    """The decoder of Stable Diffusion's autoencoder, an eighth as wide."""
    declare_operators()
    from diffusers import AutoencoderKL

    model: Any = AutoencoderKL(
        block_out_channels=(16, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=16,
    )
    decoder: nn.Module = model.decoder
    return decoder


def diffusion_unet() -> nn.Module:
    """A small diffusion U-Net without attention at full size."""
    return Denoiser(_unet_2d(("DownBlock2D",) * 3, ("UpBlock2D",) * 3, (32, 64, 128)))


def ddpm() -> nn.Module:
    """A U-Net as that of DDPM, with attention at 8 x 8."""
    down = ("DownBlock2D", "DownBlock2D", "DownBlock2D", "AttnDownBlock2D")
    up = ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D")
    return Denoiser(_unet_2d(down, up, (32, 64, 64, 128)))


def _unet_2d(
    down: tuple[str, ...], up: tuple[str, ...], channels: tuple[int, ...]
) -> nn.Module:
    declare_operators()
    from diffusers import UNet2DModel

    options: dict[str, Any] = {
        "down_block_types": down,
        "up_block_types": up,
        "block_out_channels": channels,
        "layers_per_block": 2,
        "norm_num_groups": 32,
    }
    model: Any = UNet2DModel(**options)
    made: nn.Module = model
    return made


NETWORKS: dict[str, Network] = {
    "ResNet-50": Network(partial(torchvision_model, "resnet50"), (2, 3, 224, 224)),
    "ResNet-18, group norms": Network(resnet18_group_norm, (2, 3, 224, 224)),
    "MobileNetV3": Network(
        partial(torchvision_model, "mobilenet_v3_large"), (4, 3, 224, 224)
    ),
    "ConvNeXt-atto": Network(partial(timm_model, "convnext_atto"), (4, 3, 224, 224)),
    "EfficientNet-lite0": Network(
        partial(timm_model, "efficientnet_lite0"), (4, 3, 224, 224)
    ),
    "MONAI UNet, 3-D": Network(unet_3d, (1, 1, 64, 64, 64), "depth"),
    "MONAI SegResNet": Network(segresnet, (1, 1, 256, 256)),
    "VAE decoder": Network(vae_decoder, (1, 4, 48, 48)),
    "diffusion U-Net": Network(diffusion_unet, (2, 3, 96, 96)),
    "DDPM U-Net": Network(ddpm, (2, 3, 64, 64)),
}
