"""Local convolutions, norms, concatenation and packing, without ranks or plans.

`conv2d` is differentiable; `conv2d_forward` and `conv2d_backward` are its two passes.
`backend_choice` decides between ATen and Triton, whose kernels are in `triton`.
`conv_forward` and `conv_backward` take any number of spatial dimensions.
`concat_channels` joins parts, `conv2d_parts` convolves them; `pack` and `unpack` move
boxes of images to messages and back. `norms` has the passes that norms on shards
consist of. Letters are those of `hetconv.sharding.conv_spec`.
"""

if __name__ == "kernels":
    # Found from the repository's root by whoever looks for another project's package:
    # to libraries that ask whether that is installed, this one looks like a folder
    # without code.
    globals()["__file__"] = None
else:
    from . import backend_choice, tiles
    from .backend_choice import Route
    from .compute_hook import ComputeHook, call_layer, set_compute_hook
    from .concat import concat_channels, epilogue_in_place
    from .conv2d_op import conv2d
    from .conv2d_parts_op import conv2d_parts
    from .conv_nd import conv_backward, conv_forward
    from .dispatch import (
        conv2d_backward,
        conv2d_forward,
        only_aten,
        route,
        set_backend,
    )
    from .memory_formats import (
        CHANNELS_LAST,
        fastest_format,
        in_format,
        is_channels_last,
        is_narrow_cpu,
    )
    from .packing import pack, unpack
    from .tiles import Tile

__all__ = [
    "CHANNELS_LAST",
    "ComputeHook",
    "Route",
    "Tile",
    "backend_choice",
    "call_layer",
    "concat_channels",
    "conv2d",
    "conv2d_backward",
    "conv2d_forward",
    "conv2d_parts",
    "conv_backward",
    "conv_forward",
    "epilogue_in_place",
    "fastest_format",
    "in_format",
    "is_channels_last",
    "is_narrow_cpu",
    "only_aten",
    "pack",
    "route",
    "set_backend",
    "set_compute_hook",
    "tiles",
    "unpack",
]
