"""Tiny Gemma 4 targets of both shapes, and requests to them written by hand; transformers' own class."""

import torch
from decodings import of_transformers
from draftsmith.core.batch import IMAGE, TEXT, Request
from draftsmith.core.pictures import PatchGrid, whole_picture
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.gemma.section import GemmaTarget, GemmaTargetConfig
from draftsmith.models.targets.table import family_of
from transformers import Gemma4TextConfig, Gemma4VisionConfig

VOCAB, TOKENS, EOS, PAD = 72, 70, 2, 0
START, END, IMAGE_ID = 61, 62, 63
IDS = TokenIds(VOCAB, IMAGE_ID, 1, EOS, PAD, None, START, END)
PATCH, MERGE, WINDOW = 4, 3, 7
# small: as E2B and E4B, whose last layers read an earlier one's keys and whose layers have tables of their own; large:
# as 31B, whose pictures are two-way.
SHAPES = {
    "small": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6, "use_double_wide_mlp": True},
    "large": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
              "use_bidirectional_attention": "vision"},
}  # fmt: skip
LAYERS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")


def text_values(shape: str, layers: int = 4) -> dict:
    return {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 256,
        "sliding_window": WINDOW, "layer_types": [LAYERS[n % 2] for n in range(layers)], "initializer_range": 0.25,
        "final_logit_softcapping": 4.0, **SHAPES[shape],
    }  # fmt: skip


def tower_values() -> dict:
    return {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8, "patch_size": PATCH, "pooling_kernel_size": MERGE,
            "position_embedding_size": 64, "initializer_range": 0.25}  # fmt: skip


def model(shape: str, seed: int = 0, **text):
    torch.manual_seed(seed)
    tower = tower_values() | {"standardize": shape == "large", "use_clipped_linears": shape == "small"}
    values = text_values(shape) | text
    halves = Gemma4TextConfig(**values), Gemma4VisionConfig(**tower)
    config = GemmaTargetConfig(kind="gemma4", path="tiny").joined(*halves, IDS)
    made = family_of(config).new(config).float().eval()
    with torch.no_grad():  # norms of ones and scalars of one would hide which of them is read
        for name, parameter in made.named_parameters():
            if "norm" in name or "position_embedding" in name:
                parameter += 0.2 * torch.randn_like(parameter)
        for layer in made.model.language_model.layers:
            layer.layer_scalar.fill_(0.9)
    return made


def target(made, **settings) -> GemmaTarget:
    return GemmaTarget(made, num_token_ids=TOKENS, **settings)


def request(pictures=((2, 3),), seed: int = 0, words: int = 5) -> Request:
    """Pictures of so many tokens down and across, two words after each, and more words."""
    generator = torch.Generator().manual_seed(seed)
    ids, layouts = [1, 5], []

    def write(count: int) -> None:
        ids.extend(torch.randint(6, 58, (count,), generator=generator).tolist())

    for rows, columns in pictures:
        ids.extend([START, *[IMAGE_ID] * (rows * columns), END])
        layouts.append(whole_picture(PatchGrid(1, rows * MERGE, columns * MERGE, MERGE)))
        write(2)
    write(words)
    kinds = torch.tensor([IMAGE if token == IMAGE_ID else TEXT for token in ids], dtype=torch.int8)
    count = sum(layout.num_tiles for layout in layouts)
    pixels = torch.rand(count, 3 * PATCH**2, generator=generator) if pictures else None
    return Request(torch.tensor(ids), kinds, pixels, f"r{seed}", tuple(layouts))


def published(asked: Request) -> dict:
    """The request as transformers' class takes it: patches and their places, padded to the largest picture."""
    given = {"input_ids": asked.ids[None], "attention_mask": torch.ones_like(asked.ids[None]),
             "mm_token_type_ids": (asked.ids == IMAGE_ID).long()[None]}  # fmt: skip
    if asked.pixels is None:
        return given
    most = max(picture.num_tiles for picture in asked.pictures)
    patches = torch.zeros(len(asked.pictures), most, 3 * PATCH**2)
    places = torch.full((len(asked.pictures), most, 2), -1)
    parts = asked.pixels.split([picture.num_tiles for picture in asked.pictures])
    for number, (part, picture) in enumerate(zip(parts, asked.pictures, strict=True)):
        grid = picture.whole
        patches[number, : len(part)] = part
        places[number, : len(part)] = torch.tensor([[x, y] for y in range(grid.rows) for x in range(grid.columns)])
    return given | {"pixel_values": patches, "image_position_ids": places}


def reference(made, asked: Request, max_new_tokens: int) -> list[int]:
    never = [IMAGE_ID, *range(TOKENS, VOCAB)]
    return of_transformers(made, published(asked), max_new_tokens, never=never, eos=EOS, pad=PAD)


def section(shape: str = "large", **settings) -> GemmaTargetConfig:
    values = {"kind": "gemma4", "language_model": {"model_type": "gemma4_text", **text_values(shape)}}
    values |= {"vision_tower": {"model_type": "gemma4_vision", **tower_values()}} | settings
    return GemmaTargetConfig.model_validate(values)
