"""transformers' assisted generation with a draft that sees: a copy of the target as its own draft must stand whole."""

import contextlib
import copy

import pytest
import tiny
import tiny_qwen
import torch
from draftsmith.core.errors import UserError
from draftsmith.models.assistant import chain_of, sees

TOKENS, CHAIN = 48, 5


def llava():
    asked = tiny.request(1)
    ids = asked.ids[None]
    never = [tiny.IMAGE_ID, *range(tiny.TOKENS, tiny.VOCAB)]
    return (
        tiny.llava(0),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": asked.pixels},
        never,
    )


def qwen(kind):
    ids = torch.tensor([[1, tiny_qwen.START, *[tiny_qwen.IMAGE_ID] * 4, tiny_qwen.END, 7, 8, 9, 10, 11]])
    pixels = torch.randn(16, tiny_qwen.NUMBERS, generator=torch.Generator().manual_seed(3))
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == tiny_qwen.IMAGE_ID).long(),
    }  # fmt: skip
    return tiny_qwen.model(kind), inputs, [*range(60, tiny_qwen.VOCAB)]


def passes(model, inputs, never, *, shown):
    """Forwards of the target over the answer, whose tokens must be those of plain decoding."""
    draft, count = copy.deepcopy(model), []
    chain_of(draft, CHAIN)
    # The draft's mask is guessed from the pad: one that stands in no prompt and cannot come, as in real models.
    settings = {
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "suppress_tokens": never,
        "eos_token_id": None,
        "pad_token_id": never[-1],
    }
    with sees(draft, **inputs) if shown else contextlib.nullcontext(draft) as assistant:
        hook = model.model.language_model.register_forward_hook(lambda *_: count.append(1))
        result = model.generate(**inputs, assistant_model=assistant, **settings)
        hook.remove()
    assert torch.equal(result, model.generate(**inputs, **settings))
    assert "prepare_inputs_for_generation" not in vars(draft)
    return len(count)


@pytest.mark.parametrize("made", [llava, lambda: qwen("qwen2_5_vl"), lambda: qwen("qwen3_vl")],
                         ids=["llava", "qwen2_5_vl", "qwen3_vl"])  # fmt: skip
def test_the_self_draft_count_comes_back(made):
    """Every drafted token stands: a pass for each 5 + 1 tokens. Without the wrapper most of them fall."""
    model, inputs, never = made()
    ideal = TOKENS // (CHAIN + 1)
    assert passes(model, inputs, never, shown=True) == ideal
    blind = passes(model, inputs, never, shown=False)
    assert blind > 2 * ideal, f"{blind} passes without the wrapper: transformers shows the picture again, drop it"


def test_nothing_to_see():
    with pytest.raises(UserError, match="no pixels"), sees(tiny.llava(0), input_ids=torch.ones(1, 2)):
        pass
