"""What a language model's passes make for a moment, beside weights and cache: towers over pictures, prompts, batches.

A pass over few layers and few chunks of a prompt is counted (`counted.py`); more of them add equal steps. Parts that a
count leaves out are formulas: scores of a tree on their way through the warp, and tables of Gemma 4's layers. Of ranks
that hold a model together each is counted as if it computed all heads, which is more than it makes.
Letters: D width, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.pictures import IMAGE, TEXT, Picture
from ...core.section import torch_dtype
from ...models.decoding.decoder import CachedDecoder
from ...models.families.load import TargetConfig
from ...models.families.memory import BYTES, cache_bytes
from ...models.families.sizes import empty_model
from ...models.families.table import family_of
from ...models.hub import config_value, num_deepstack, rope_of
from ...models.targets.verification import DYNAMIC
from .counted import META, along, most_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYERS = 2  # of a shallow copy, or more where layers are of several kinds
_TILES = 32  # that a tower of single tiles reads at once
_ATTENDED = 256  # last places of a prompt whose attention a drafter reads, computed eagerly
_LARGEST = 2048  # tokens of pictures that a tower's pass is counted with; more add equal steps


@dataclass(frozen=True)
class Pass:
    """What a model is asked to do.

    Args:
        positions: of the prompt (or of all rows of a batch) with what is decoded after it.
        chunk: places of a prompt that are run at once; None: all.
        nodes: of a tree, with its root; 0: none is verified.
        attention: whether the attention over the prompt is computed, eagerly, for a drafter to read.
    """

    positions: int
    chunk: int | None = None
    nodes: int = 0
    attention: bool = False


def moment(config: PreTrainedConfig, section: TargetConfig | None, dtype: str, asked: Pass) -> float:
    """Bytes that live at most for a moment: the tower's pass over a prompt of pictures, or the language model's.

    Args:
        config: of the whole model.
        section: of a target; None: of a draft.
    """
    text, model, step = config.get_text_config(), _Model.of(config, section, dtype), asked.chunk or asked.positions
    own = asked.chunk, asked.attention
    prompt = along(lambda places: _prompt(model, round(places), *own), asked.positions, 2 * step)
    if asked.nodes:  # float32: scores, warped, sorted, probabilities
        prompt += 4 * 4 * asked.nodes * text.vocab_size
    # Tables of the layers that a shallow copy of Gemma lacks: of the prompt; of a chunk projected, normed and summed.
    tables = (text.num_hidden_layers - _LAYERS) * (config_value(text, "hidden_size_per_layer_input") or 0)
    width = BYTES[dtype]
    chunk = min(asked.chunk or asked.positions, asked.positions)
    prompt += tables * (asked.positions * width + chunk * (3 * width + 4))
    return max(prompt, tower_moment(config, section, dtype, asked.positions))


def tower_moment(config: PreTrainedConfig, section: TargetConfig | None, dtype: str, positions: int) -> float:
    """Bytes of the tower and the projector over pictures that fill so many positions; 0: there is no tower."""
    if config_value(config, "vision_config") is None:
        return 0.0
    model, picture = _Model.of(config, section, dtype), fill_with_pictures(config, positions)[0][0]
    if picture.whole is None:
        first = _TILES * picture.num_tokens
    elif family_of(config).pictures.one_by_one:  # type: ignore[union-attr]  # a larger prompt has more of them
        first, positions = picture.num_tokens, picture.num_tokens
    else:
        first = _LARGEST
    return along(lambda places: _tower(model, round(places)), positions, first)


@dataclass(frozen=True)
class _Model:
    """What counts are kept by: the text says all that a model is."""

    text: str
    config: PreTrainedConfig = field(compare=False)
    section: TargetConfig | None = field(compare=False)
    dtype: str = field(compare=False)

    @classmethod
    def of(cls, config: PreTrainedConfig, section: TargetConfig | None, dtype: str) -> _Model:
        kind = None if section is None else section.kind
        return cls(f"{dtype} {kind} {config.to_json_string(use_diff=False)}", config, section, dtype)

    def decoder(self, config: PreTrainedConfig) -> CachedDecoder:
        """The cached forward over an empty model of this config, its own or a shallow copy."""
        model, count = empty_model(config, torch_dtype(self.dtype)), config.get_text_config().vocab_size
        if self.section is not None and config_value(config, "vision_config") is not None:
            decoder: CachedDecoder = self.section.target(model, num_token_ids=count, image_token_id=None).decoder
            return decoder
        return family_of(config).decoder(model, num_token_ids=count)


@functools.lru_cache(256)
def _prompt(model: _Model, length: int, chunk: int | None, attention: bool) -> float:
    """Bytes of a prompt of just this length, beside its cache."""
    config = shallow(model.config)
    decoder = model.decoder(config)
    return most_bytes(lambda: _run(decoder, length, chunk, attention)) - cache_bytes(config, model.dtype, length)


@torch.no_grad()
def _run(decoder: CachedDecoder, length: int, chunk: int | None, attention: bool) -> object:
    words = torch.full((1, length), TEXT, dtype=torch.int8)
    rows = decoder.prompts(torch.ones(1, length, dtype=torch.int64, device=META), words.to(META), on_host=(words, None))
    queries = torch.arange(length) >= length - _ATTENDED
    tapped: dict[str, Any] = {"attention": (decoder.num_layers - 1,), "queries": queries} if attention else {}
    states = decoder.run(rows, decoder.new_cache(length), chunk=chunk, **tapped)
    return rows, states, decoder.logits(states.feature[0, -1:])


@functools.lru_cache(256)
def _tower(model: _Model, positions: int) -> float:
    """Bytes of pictures that take just so many positions."""
    config = shallow(model.config)
    decoder = model.decoder(config)
    pictures, pixels = fill_with_pictures(config, positions)
    shown = torch.full((1, sum(picture.num_tokens for picture in pictures)), IMAGE, dtype=torch.int8)
    ids = torch.ones(shown.shape, dtype=torch.int64, device=META)
    with torch.no_grad():
        return most_bytes(lambda: decoder.prompts(ids, shown.to(META), pixels, pictures, on_host=(shown, None)))


def fill_with_pictures(config: PreTrainedConfig, positions: int) -> tuple[list[Picture], Tensor]:
    """Pictures that take at most so many positions, one at least, and their pixels without values."""
    read = family_of(config).pictures
    assert read is not None, "a tower that no family has"
    pictures, shape = read.fill(config, positions)
    return pictures, torch.empty(shape, device=META)


def shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with a layer of each kind, two at least."""
    config = copy.deepcopy(config)
    text, vision = config.get_text_config(), config_value(config, "vision_config")
    kinds: Sequence[str] = config_value(text, "layer_types") or ()
    text.num_hidden_layers = min(text.num_hidden_layers, max(_LAYERS, num_deepstack(config), len(set(kinds))))
    if kinds:
        every = sorted(set(kinds), reverse=True)  # sliding before full attention
        text.layer_types = [every[number % len(every)] for number in range(text.num_hidden_layers)]
    if config_value(text, "num_kv_shared_layers"):
        text.num_kv_shared_layers = 0
    if rope_of(text).get("rope_type") in DYNAMIC:  # asks the device how long the text is; as large as any other
        text.rope_parameters = {"rope_type": "default", "rope_theta": rope_of(text)["rope_theta"]}
    if vision is not None and (read := family_of(config).pictures) is not None:
        read.shallow(config, _LAYERS)
    return config
