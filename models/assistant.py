"""Gives an assistant model its pictures in `transformers.generate(assistant_model=...)`; transformers 5.x drafts
without them.

There the target encodes its pictures once and takes the pixels out of what it hands on; the assistant's first pass is
given none, its placeholders read their own rows of the embedding, and nothing says so: the output stays the target's,
drafted tokens stand by chance. `sees` gives the assistant its pictures back for as long as its cache is empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ..core.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# What a processor makes of pictures and clips, by the names that models take.
PICTURES = (
    "pixel_values", "image_sizes", "image_grid_thw", "pixel_values_videos", "image_sizes_videos", "video_grid_thw",
    "second_per_grid_ts", "mm_token_type_ids", "batch_num_images",
)  # fmt: skip


@contextmanager
def sees(assistant: PreTrainedModel, **inputs: Any) -> Iterator[PreTrainedModel]:
    """The assistant with the pictures of one request attached.

        with sees(draft, **inputs) as assistant:
            target.generate(**inputs, assistant_model=assistant, max_new_tokens=64, do_sample=False)

    Args:
        inputs: of the assistant's own processor, as `generate` takes them; ids and masks are ignored.

    Raises:
        UserError: there is no picture among them.
    """
    pictures = {name: value for name, value in inputs.items() if name in PICTURES and value is not None}
    if not any(name.startswith("pixel_values") for name in pictures):
        raise UserError("no pixels among the inputs", hint="give what the processor made: sees(draft, **inputs)")
    prepare = cast(Callable[..., dict[str, Any]], assistant.prepare_inputs_for_generation)

    # `generate` reads the signature to find out what a model takes.
    @functools.wraps(prepare)
    def prepare_with_pictures(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(*args, **kwargs)
        # The target's encoder outputs: of its own width, and dropped after this pass in any case.
        inputs.pop("mm_encoder_outputs", None)
        cache = kwargs.get("past_key_values")
        if cache is None or cache.get_seq_length() == 0:
            for name, value in pictures.items():
                if isinstance(value, Tensor):
                    value = value.to(assistant.device, assistant.dtype if value.is_floating_point() else value.dtype)
                inputs[name] = value
        return inputs

    object.__setattr__(assistant, "prepare_inputs_for_generation", prepare_with_pictures)
    try:
        yield assistant
    finally:
        del assistant.__dict__["prepare_inputs_for_generation"]


def chain_of(assistant: PreTrainedModel, length: int) -> GenerationConfig:
    """Let the assistant draft `length` tokens each time: its defaults stop early and adapt, which no paper measures."""
    config = assistant.generation_config
    config.num_assistant_tokens = length
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return config
