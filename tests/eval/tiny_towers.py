"""Tiny targets whose towers are neither LLaVA's nor Qwen-VL's, and requests to them written by hand; transformers' own
classes.
"""

import torch
from decodings import of_transformers
from draftsmith.core.batch import IMAGE, TEXT, Request
from draftsmith.core.pictures import PatchGrid, Picture, whole_picture
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.internvl.section import InternVLTarget, InternVLTargetConfig
from draftsmith.models.targets.mistral.section import MistralTarget, MistralTargetConfig
from draftsmith.models.targets.table import family_of
from transformers import (
    InternVLVisionConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB, TOKENS, EOS, PAD = 72, 70, 2, 0
START, END, IMAGE_ID = 61, 62, 63
IDS = TokenIds(VOCAB, IMAGE_ID, None, EOS, PAD, None, START, END)
# Kind -> config of its language model.
KINDS = {
    "internvl": Qwen2Config, "internvl of qwen3": Qwen3Config, "internvl of llama": LlamaConfig,
    "mistral3": MistralConfig, "mistral3 of ministral3": Ministral3Config, "pixtral": MistralConfig,
}  # fmt: skip
TILE, PATCH = 16, 4  # pixels; 2 x 2 tokens a tile
BREAK = 60  # ends a row of tokens of a picture that is read whole; END the last one
# Queries are scaled by their positions, and rotations stretched (the published Ministral 3, smaller).
MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def text_values(layers: int = 3, width: int = 32) -> dict:
    return {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25,
        "tie_word_embeddings": False,
    }  # fmt: skip


def is_whole(kind: str) -> bool:
    """Whether its pictures are read whole."""
    return not kind.startswith("internvl")


def tower_values(kind: str) -> dict:
    values = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": TILE, "patch_size": PATCH}  # fmt: skip
    return values | {"image_size": 8 * TILE} if is_whole(kind) else values | {"attention_bias": True}


def model(kind: str, seed: int = 0, **text):
    torch.manual_seed(seed)
    own = {"head_dim": 8, "sliding_window": None} if is_whole(kind) else {}
    own |= {"rope_parameters": dict(MINISTRAL)} if kind.endswith("ministral3") else {}
    language = KINDS[kind](**(text_values() | own | text))
    if is_whole(kind):
        vision = PixtralVisionConfig(**tower_values(kind))
        config = MistralTargetConfig(kind=kind.split()[0], path="tiny").joined(language, vision, IDS)
    else:
        vision = InternVLVisionConfig(**tower_values(kind))
        config = InternVLTargetConfig(kind="internvl", path="tiny").joined(language, vision, IDS)
    made = family_of(config).new(config).float().eval()
    # Random towers say little: louder pictures make blindness visible.
    made.model.multi_modal_projector.linear_2.weight.data *= 40
    return made


def target(model, **settings):
    kind = InternVLTarget if model.config.model_type == "internvl" else MistralTarget
    return kind(model, num_token_ids=TOKENS, **settings)


def request(kind: str, tiles=(1,), seed: int = 0, words: int = 5) -> Request:
    """Pictures of so many tiles (or whole ones, of so many tokens across), two words after each, and more words."""
    generator = torch.Generator().manual_seed(seed)
    ids, modality, pictures = [5], [TEXT], []

    def write(count: int) -> None:
        ids.extend(torch.randint(6, 58, (count,), generator=generator).tolist())
        modality.extend([TEXT] * count)

    merge = 1 if kind == "pixtral" else 2
    for number in tiles:
        picture = Picture(TILE // PATCH // 2, number)
        rows, columns = [START], picture.num_tokens
        if is_whole(kind):
            picture, rows, columns = whole_picture(PatchGrid(1, 3 * merge, number * merge, merge)), [], number
        for row in range(3 if is_whole(kind) else 1):
            rows += [*[IMAGE_ID] * columns, BREAK if is_whole(kind) and row < 2 else END]
        ids.extend(rows)
        modality.extend([IMAGE if token == IMAGE_ID else TEXT for token in rows])
        pictures.append(picture)
        write(2)
    write(words)
    count, shape = sum(picture.num_tiles for picture in pictures), (3, TILE, TILE)
    shape = (3 * PATCH**2,) if is_whole(kind) else shape
    pixels = torch.randn(count, *shape, generator=generator) if tiles else None
    return Request(torch.tensor(ids), torch.tensor(modality, dtype=torch.int8), pixels, f"r{seed}", tuple(pictures))


def published(asked: Request) -> dict:
    """The request as transformers' class takes it."""
    given = {"input_ids": asked.ids[None], "attention_mask": torch.ones_like(asked.ids[None])}
    if asked.pixels is None:
        return given
    if asked.pictures[0].whole is None:
        return given | {"pixel_values": asked.pixels}
    images = [
        part.view(p.whole.rows, p.whole.columns, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
        for part, p in zip(asked.pixels.split([p.num_tiles for p in asked.pictures]), asked.pictures, strict=True)
    ]
    sizes = [tuple(image.shape[1:]) for image in images]
    padded = torch.zeros(len(images), 3, *(max(side) for side in zip(*sizes, strict=True)))
    for into, image in zip(padded, images, strict=True):
        into[:, : image.shape[1], : image.shape[2]] = image
    return given | {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}


def reference(model, asked: Request, max_new_tokens: int) -> list[int]:
    never = [IMAGE_ID, *range(TOKENS, VOCAB)]
    return of_transformers(model, published(asked), max_new_tokens, never=never, eos=EOS, pad=PAD)
