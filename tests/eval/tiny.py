"""Tiny random models for the decoding tests; real classes, no mocks of our own code."""

import copy
from dataclasses import dataclass

import torch
from decodings import of_transformers
from draftsmith.core.batch import IMAGE, TEXT, Request
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.llava.model import LlavaDecoder, assemble, llava_config
from draftsmith.models.targets.llava.section import LlavaTarget
from transformers import CLIPVisionConfig, LlamaConfig

VOCAB, TOKENS, IMAGE_ID, EOS = 64, 60, 59, 2  # rows 60 to 63 have no token
PATCHES = 4


@dataclass(frozen=True)
class Sizes:
    """What tests of the loop must not take for granted. The last four rows of the vocabulary have no token."""

    vocab: int = VOCAB
    heads: int = 2
    kv_heads: int = 1
    side: int = 2  # patches across a picture

    @property
    def num_patches(self) -> int:
        return self.side**2


SIZES = {"small": Sizes(), "other": Sizes(vocab=101, heads=4, kv_heads=2, side=3)}


def llava(seed: int, width: int = 32, layers: int = 2, *, sizes: Sizes = Sizes()):
    torch.manual_seed(seed)
    text = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, vocab_size=sizes.vocab, max_position_embeddings=256, initializer_range=0.25,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8 * sizes.side,
        patch_size=8,
    )  # fmt: skip
    model = assemble(llava_config(text, vision, TokenIds(sizes.vocab, IMAGE_ID, 1, EOS, 3))).eval()
    # Random towers say little: louder pictures make blindness visible.
    model.model.multi_modal_projector.linear_2.weight.data *= 40
    return model


def with_random_weights(
    text: tuple[int, int, int, int], tower: tuple[int, int, int, int], ids: TokenIds, *, side: int, patch: int,
    **settings,
):  # fmt: skip
    """A LLaVA; `text` and `tower` are (width, inner width, layers, heads), `side` and `patch` pixels."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    settings = {"max_position_embeddings": 2048, "initializer_range": 0.03} | settings
    language = LlamaConfig(**{"vocab_size": ids.vocab_size, **dict(zip(keys, text, strict=True)), **settings})
    vision = CLIPVisionConfig(**{"image_size": side, "patch_size": patch, **dict(zip(keys, tower, strict=True))})
    torch.manual_seed(0)
    return assemble(llava_config(language, vision, ids)).eval()


def near(model):
    """A draft that agrees with the target now and then: a copy with noise on its head."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    model.lm_head.weight.data += 0.12 * torch.randn(model.lm_head.weight.shape, generator=generator)
    return model


def target(model) -> LlavaTarget:
    return LlavaTarget(model, num_token_ids=num_tokens(model), image_token_id=IMAGE_ID)


def num_tokens(model) -> int:
    return model.config.text_config.vocab_size - (VOCAB - TOKENS)


def proposal(model, mode: str = "M") -> IndependentProposal:
    decoder = LlavaDecoder(model, num_token_ids=num_tokens(model), never=(IMAGE_ID,))
    return IndependentProposal(decoder, mode, newline_id=5)


def self_draft(model, mode: str = "M") -> IndependentProposal:
    return proposal(copy.deepcopy(model), mode)


def request(seed: int, images: int = 1, words: int = 6, *, sizes: Sizes = Sizes()) -> Request:
    generator = torch.Generator().manual_seed(seed)
    ids, modality = [1], [TEXT]
    for _ in range(images):
        ids += [7] + [IMAGE_ID] * sizes.num_patches
        modality += [TEXT] + [IMAGE] * sizes.num_patches
    text = torch.randint(6, 58, (words,), generator=generator).tolist()
    across = 8 * sizes.side
    pixels = torch.randn(images, 3, across, across, generator=generator) if images else None
    ids, modality = ids + text, modality + [TEXT] * words
    return Request(torch.tensor(ids), torch.tensor(modality, dtype=torch.int8), pixels, f"r{seed}")


@torch.no_grad()
def next_scores(model, asked: Request, ids) -> torch.Tensor:
    """[V] of the token after the prompt and these ids, by transformers' forward; rows without a token never come."""
    whole = torch.cat([asked.ids, torch.tensor(ids, dtype=torch.int64)])
    scores = model(input_ids=whole[None], pixel_values=asked.pixels).logits[0, -1]
    scores[[IMAGE_ID, *range(num_tokens(model), len(scores))]] = float("-inf")
    return scores


def reference(model, asked: Request, max_new_tokens: int) -> list[int]:
    """Greedy continuation by transformers' own loop, with the same ids kept out."""
    given = {"input_ids": asked.ids[None], "attention_mask": torch.ones_like(asked.ids[None])}
    given |= {} if asked.pixels is None else {"pixel_values": asked.pixels}
    never = [IMAGE_ID, *range(num_tokens(model), model.config.text_config.vocab_size)]
    return of_transformers(model, given, max_new_tokens, never=never, eos=EOS, pad=3)
