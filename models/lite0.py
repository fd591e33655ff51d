"""EfficientNet-Lite0 (Tan and Le, 2019; the Lite models of 2020) as a tower of transformers: 3.4M weights, on any CPU.

transformers' own EfficientNet has squeeze-and-excitation in every block and swish, which the Lite models do without. A
picture becomes 2 x 2 places that have its features in common: the mean of the last layer, and the map of the last block
before the stride of 32, pooled to 4 x 4. Behind them stands which place it is, as a one-hot, so that LLaVA's projector
learns a bias for each: four different tokens about one picture.
Letters: B pictures, S side in pixels, C features, G places.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, CLIPImageProcessorPil, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..core.pretrained import name_accelerator, without_bars

LITE0 = "efficientnet_lite0"
_MAP = 4  # sides of what the map of an inner block is pooled to
_MAP_STRIDE = 16
_EPS = 1e-3
MEAN, STD = 0.498, 0.502  # of the pixels in [0, 1] that it was trained on


class EfficientNetLite0Config(PreTrainedConfig):
    """Sizes of the published Lite0."""

    model_type = LITE0
    image_size: int = 224
    # LLaVA counts a picture's tokens by the side of a patch: 2 x 2.
    patch_size: int = 112
    num_channels: int = 3
    stem_channels: int = 32
    # Kernel, stride, expansion, channels and number of the blocks of each row.
    rows: list[list[int]] | tuple[tuple[int, ...], ...] = (
        (3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (5, 2, 6, 40, 2), (3, 2, 6, 80, 3), (5, 1, 6, 112, 3),
        (5, 2, 6, 192, 4), (3, 1, 6, 320, 1),
    )  # fmt: skip
    head_channels: int = 1280
    # One state is kept, the last (LLaVA counts the layers before it): no key of a recipe, as it has no annotation.
    num_hidden_layers = 0
    hidden_size: int | None = None  # follows from the others
    # Share of the features that a picture loses in training: few pictures are learned by heart.
    feature_dropout: float = 0.4

    def __post_init__(self, **kwargs: Any):
        self.rows = [list(row) for row in self.rows]
        blocks, last = _sizes(self)
        features = self.head_channels + blocks[last][1] * _MAP**2
        self.hidden_size = features + (self.image_size // self.patch_size) ** 2
        super().__post_init__(**kwargs)


def _sizes(config: Any) -> tuple[list[tuple[int, int, int, int, int]], int]:
    """Inputs, outputs, kernel, stride and expansion of each block, and the number of the last before a stride of 32."""
    blocks: list[tuple[int, int, int, int, int]] = []
    channels, whole, last = config.stem_channels, 2, 0
    for kernel, stride, expansion, width, count in config.rows:
        blocks += [(channels, width, kernel, stride, expansion), *[(width, width, kernel, 1, expansion)] * (count - 1)]
        channels, whole = width, whole * stride
        last = len(blocks) - 1 if whole <= _MAP_STRIDE else last
    return blocks, last


class _Norm(nn.BatchNorm2d):
    """Batch norm by the stored statistics, in training, too: by a batch's own, what the tower says of a picture would
    hang on the pictures beside it, and a frozen tower's running statistics would move at every forward.
    """

    def forward(self, input: Tensor) -> Tensor:
        # Where an engine trains in 16 bits, it casts weights and leaves buffers as they are.
        mean, var = (cast(Tensor, part).to(input.dtype) for part in (self.running_mean, self.running_var))
        return F.batch_norm(input, mean, var, self.weight, self.bias, False, 0.0, _EPS)


def _conv(module: nn.Conv2d, states: Tensor) -> Tensor:
    """A convolution padded as TensorFlow's SAME: where the stride is 2, one pixel less at the left and the top."""
    whole = module.kernel_size[0] - module.stride[0]
    before = whole // 2
    return module(F.pad(states, (before, whole - before) * 2))


class _Block(nn.Module):
    """Expansion, depthwise convolution, projection; a residual where nothing changes its shape."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        inner = inputs * expansion
        self.expands, self.adds = expansion > 1, stride == 1 and inputs == outputs
        if self.expands:
            self.expand_conv, self.bn0 = nn.Conv2d(inputs, inner, 1, bias=False), _Norm(inner)
        self.depthwise_conv = nn.Conv2d(inner, inner, kernel, stride, groups=inner, bias=False)
        self.bn1 = _Norm(inner)
        self.project_conv, self.bn2 = nn.Conv2d(inner, outputs, 1, bias=False), _Norm(outputs)

    def forward(self, states: Tensor) -> Tensor:
        inner = F.relu6(self.bn0(self.expand_conv(states))) if self.expands else states
        inner = F.relu6(self.bn1(_conv(self.depthwise_conv, inner)))
        inner = self.bn2(self.project_conv(inner))
        return states + inner if self.adds else inner


class EfficientNetLite0Model(PreTrainedModel):
    """The tower: pixels [B,3,S,S] -> states [B,G,C+G], the only ones that it keeps.

    The buffers `mean` and `std` [C] norm the features by channel: 0 and 1 until somebody writes those of his
    pictures into the weights.
    """

    config_class = EfficientNetLite0Config
    main_input_name = "pixel_values"
    # It has no attention: whichever a LLaVA is loaded with is right.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _no_split_modules = ["_Block"]  # noqa: RUF012
    mean: Tensor
    std: Tensor

    def __init__(self, config: Any):
        super().__init__(config)
        self.conv_stem = nn.Conv2d(config.num_channels, config.stem_channels, 3, 2, bias=False)
        self.bn0 = _Norm(config.stem_channels)
        sizes, self.map_block = _sizes(config)
        self.blocks = nn.ModuleList(_Block(*each) for each in sizes)
        self.conv_head = nn.Conv2d(sizes[-1][1], config.head_channels, 1, bias=False)
        self.bn1 = _Norm(config.head_channels)
        self.num_places = (config.image_size // config.patch_size) ** 2
        features = config.hidden_size - self.num_places
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))
        self.post_init()

    def maps(self, images: Tensor) -> list[Tensor]:
        """[B,C,h,w] of the last block at each stride up to 16, of pictures [B,3,S,S] in [0, 1]: how they look, before
        what they show.
        """
        pixel_values = (images - MEAN) / STD
        states, kept = self._stem(pixel_values.to(memory_format=torch.channels_last)), []
        blocks: Any = self.blocks[: self.map_block + 1]
        for block in blocks:
            if block.depthwise_conv.stride[0] > 1:
                kept.append(states)
            states = block(states)
        return [*kept, states]

    def features(self, pixel_values: Tensor) -> Tensor:
        """[B,C] of pictures, before they are normed: what `mean` and `std` are taken of."""
        # On a CPU twice as fast as the usual order.
        inner = pixel_values.to(memory_format=torch.channels_last)
        states = self._stem(inner)
        for number, block in enumerate(self.blocks):
            states = block(states)
            inner = states if number == self.map_block else inner
        last = F.relu6(self.bn1(self.conv_head(states)))
        return torch.cat([last.mean((2, 3)), F.adaptive_avg_pool2d(inner, _MAP).flatten(1)], 1)

    def _stem(self, pixel_values: Tensor) -> Tensor:
        return F.relu6(self.bn0(_conv(self.conv_stem, pixel_values)))

    def forward(self, pixel_values: Tensor, output_hidden_states: bool | None = None, **kwargs: Any) -> BaseModelOutput:
        """`hidden_states` has the last state alone, which `last_hidden_state` is."""
        features = self.features(pixel_values)
        normed = (features - self.mean.to(features)) / self.std.to(features)
        normed = F.dropout(normed, self.config.feature_dropout, self.training)
        places = torch.eye(self.num_places, dtype=normed.dtype, device=normed.device)
        shape = (len(normed), self.num_places, -1)
        states = torch.cat([normed[:, None].expand(shape), places.expand(shape)], -1)
        return BaseModelOutput(last_hidden_state=states, hidden_states=(states,))

    def fit_norms(self, states: Tensor) -> Tensor:
        """Take the channels' mean and deviation from what it says of many pictures, [N,G,C+G], and return that
        normed by them.
        """
        channels = states[:, 0, : len(self.mean)]
        mean, std = channels.mean(0), channels.std(0) + 1e-3
        self.mean, self.std = self.mean + self.std * mean, self.std * std
        normed = ((channels - mean) / std)[:, None].expand(-1, self.num_places, -1)
        return torch.cat([normed, states[..., len(self.mean) :]], -1)


def save_lite0(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tower's folder from the published checkpoint (`efficientnet-lite0-57934424.pth`), classifier left out:
    config, weights, and how the pictures are cut. Raises `RuntimeError` for tensors of another model.
    """
    config = EfficientNetLite0Config()
    model = EfficientNetLite0Model(config)
    named = {".".join(part.removeprefix("_") for part in name.split(".")): value for name, value in state.items()}
    weights = {name: value for name, value in named.items() if not name.startswith("fc.")}
    model.load_state_dict({**weights, "mean": model.mean, "std": model.std})
    side: Any = config.image_size
    images = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, resample=3,
        image_mean=[MEAN] * 3, image_std=[STD] * 3,
    )  # fmt: skip
    name_accelerator()
    with without_bars(in_terminals=True):
        model.save_pretrained(folder)
    images.save_pretrained(folder)


AutoConfig.register(LITE0, EfficientNetLite0Config)
AutoModel.register(EfficientNetLite0Config, EfficientNetLite0Model)
