"""Models that others wrote, small and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Shape = tuple[int, ...]


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic"
        )
    )


def bottlenecks() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 24], depths=[1, 1], num_labels=5
        )
    )


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(
        ConvNextConfig(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2)
    )


def regnet() -> nn.Module:
    from transformers import RegNetConfig, RegNetModel

    return RegNetModel(
        RegNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4
        )
    )


def mobilenet() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2Model

    return MobileNetV2Model(
        MobileNetV2Config(
            depth_multiplier=0.1, min_depth=4, depth_divisible_by=4, output_stride=8
        )
    )


def vae() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=4,
    )


class Denoiser(nn.Module):
    """A diffusion U-Net at one fixed time."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        self.unet = UNet2DModel(
            sample_size=16,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=4,
        )

    def forward(self, x: Any) -> Any:
        return self.unet(x, 7).sample


def unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(2, 1, 2, (4, 8, 8), (2, 2), num_res_units=1)


def segresnet() -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(2, init_filters=8, blocks_down=(1, 1), blocks_up=(1,))


def dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8])


def volumes() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (4, 8, 8), (2, 2), num_res_units=1)


def segresnet_of_volumes() -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(3, init_filters=8, blocks_down=(1, 1), blocks_up=(1,))


ZOO: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "transformers ResNet": (resnet, (2, 3, 40, 32)),
    "transformers ResNet, bottlenecks": (bottlenecks, (2, 3, 32, 32)),
    "transformers ConvNeXt": (convnext, (2, 3, 40, 32)),
    "transformers RegNet": (regnet, (2, 3, 40, 32)),
    "transformers MobileNetV2": (mobilenet, (2, 3, 40, 32)),
    "diffusers AutoencoderKL": (vae, (1, 3, 20, 16)),
    "diffusers UNet2DModel": (Denoiser, (1, 3, 16, 16)),
    "monai UNet": (unet, (1, 1, 20, 16)),
    "monai SegResNet": (segresnet, (1, 1, 20, 16)),
    "monai DynUNet": (dynunet, (1, 1, 20, 16)),
    "monai UNet of volumes": (volumes, (1, 1, 20, 12, 8)),
    "monai SegResNet of volumes": (segresnet_of_volumes, (1, 1, 10, 8, 6)),
}
