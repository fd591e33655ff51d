"""Tiny Qwen-VL of every family, and requests to them written by hand; transformers' own classes."""

from pathlib import Path

import torch
from decodings import of_transformers
from draftsmith.core.batch import IMAGE, TEXT, VIDEO, Request
from draftsmith.core.pictures import PatchGrid, whole_picture
from draftsmith.data.collate import Sample, collate
from draftsmith.data.families.table import PICTURE_FAMILIES
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.qwen.model import qwen_config
from draftsmith.models.targets.qwen.section import QwenSection, QwenTarget
from draftsmith.models.targets.table import FAMILIES, LANGUAGE_TARGETS, family_of

VOCAB, TOKENS, EOS, PAD = 72, 70, 2, 0
END, START, CLIP_ID, IMAGE_ID = 60, 61, 62, 63
IDS = TokenIds(VOCAB, IMAGE_ID, None, EOS, PAD, CLIP_ID, START, END)
# Qwen3.5, an extra, among them.
KINDS = tuple(name for (name, _), family in FAMILIES.items() if family.kind.startswith("qwen"))
PATCH, NUMBERS = 4, 3 * 2 * 4 * 4  # of a patch: channels, two frames, its pixels

_ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}


def text_config(kind: str, layers: int, width: int) -> dict:
    config = {
        "model_type": f"{kind}_text", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // 8, "num_key_value_heads": width // 16, "max_position_embeddings": 512,
        "initializer_range": 0.25, "rope_scaling": _ROPE,
    }  # fmt: skip
    if kind.startswith("qwen3"):
        config |= {"head_dim": 8, "rope_scaling": _ROPE | {"mrope_interleaved": True}}
    if kind.startswith("qwen3_5"):  # of four layers three recur
        config |= {
            "rope_parameters": config.pop("rope_scaling") | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
        }  # fmt: skip
    if kind.endswith("moe"):
        config |= {"moe_intermediate_size": width, "num_experts": 4, "num_experts_per_tok": 2}
    if kind == "qwen3_5_moe":
        config |= {"shared_expert_intermediate_size": width}
        del config["intermediate_size"]  # it has experts alone
    return config


def vision_config(kind: str, width: int) -> dict:
    config = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if kind == "qwen2_vl":
        return config | {"embed_dim": 32, "hidden_size": width, "mlp_ratio": 2}
    config |= {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": width}
    if kind == "qwen2_5_vl":
        return config | {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 4}
    config |= {"num_position_embeddings": 64}
    return config if kind.startswith("qwen3_5") else config | {"deepstack_visual_indexes": [0, 1]}


def model(kind: str, seed: int = 0, layers: int = 4, width: int = 32):
    torch.manual_seed(seed)
    recipe_kind = FAMILIES[kind, ""].kind
    config = qwen_config(recipe_kind, text_config(kind, layers, width), vision_config(kind, width), IDS)
    made = FAMILIES[kind, ""].new(config).float().eval()
    # Random towers say little: louder pictures make blindness visible.
    for merger in (made.model.visual.merger, *getattr(made.model.visual, "deepstack_merger_list", ())):
        last = [m for m in merger.modules() if isinstance(m, torch.nn.Linear)][-1]
        last.weight.data *= 40
    return made


def saved(
    folder: Path, kind: str, words: list[str], layers: int, *, chat_template: str | None = None, **pixels
) -> None:
    """A model and its processor, whose tokenizer knows questions that are answered with these words; in `target`."""
    said = [f"Which? {' '.join(words[i:] + words[:i])}." for i in range(len(words))]
    tokenizer = train_tokenizer(["user assistant system\n", *said] * 3, 400)
    tokenizer.chat_template = chat_template
    processor = PICTURE_FAMILIES[kind].new(
        tokenizer, patch_size=PATCH, image_mean=(0.5,) * 3, image_std=(0.25,) * 3, **pixels
    )
    ids = TokenIds(
        len(tokenizer), processor.image_token_id, processor.bos_id, processor.eos_id, processor.pad_id,
        processor.video_token_id, processor.vision_start_id, processor.vision_end_id,
    )  # fmt: skip
    torch.manual_seed(0)
    config = qwen_config(kind, text_config(kind, layers, 32), vision_config(kind, 32), ids)
    family_of(config).new(config).save_pretrained(folder / "target")
    processor.save(folder / "target")


def target(model, **settings) -> QwenTarget:
    made = section(FAMILIES[model.config.model_type, ""].kind, path="tiny", **settings)
    return made.target(model, num_token_ids=TOKENS, image_token_id=IMAGE_ID)


def clip_pictures(kind: str, frames: int, rows: int, columns: int, seconds: float):
    if not kind.startswith("qwen3"):
        return [whole_picture(PatchGrid(frames, rows, columns, seconds=seconds), VIDEO)]
    return [whole_picture(PatchGrid(1, rows, columns, part=n, timestamp=n * seconds), VIDEO) for n in range(frames)]


def request(kind: str, images=((4, 6),), clip: tuple[int, int, int] | None = None, seed: int = 0, words: int = 5):
    """Images of so many rows and columns of patches, a clip of so many frames, rows and columns, words after each."""
    generator = torch.Generator().manual_seed(seed)
    ids, modality, pictures = [5], [TEXT], []

    def write(count: int) -> None:
        ids.extend(torch.randint(6, 58, (count,), generator=generator).tolist())
        modality.extend([TEXT] * count)

    def show(picture, token: int) -> None:
        ids.extend([START, *[token] * picture.num_tokens, END])
        modality.extend([TEXT, *[picture.modality] * picture.num_tokens, TEXT])
        pictures.append(picture)

    for rows, columns in images:
        show(whole_picture(PatchGrid(1, rows, columns), IMAGE), IMAGE_ID)
        write(2)
    for picture in clip_pictures(kind, *clip, seconds=1.25) if clip else ():
        if kind.startswith("qwen3"):
            write(2)  # the time
        show(picture, CLIP_ID)
    write(words)
    count = sum(picture.num_tiles for picture in pictures)
    pixels = torch.randn(count, NUMBERS, generator=generator) if count else None
    return Request(torch.tensor(ids), torch.tensor(modality, dtype=torch.int8), pixels, f"r{seed}", tuple(pictures))


def sample_of(asked: Request, last: int = 3, first: bool = False) -> Sample:
    """A request as a sample of training, whose `last` tokens are supervised, and its first one too if `first`."""
    ids, start = asked.ids.tolist(), len(asked.ids) - last
    supervised = [(first and n == 0) or n >= start for n in range(len(ids))]
    return Sample(ids, supervised, asked.modality.tolist(), asked.pixels, asked.name, asked.pictures)


def batch_of(*asked: Request, image_size: int = 8, last: int = 3):
    return collate([sample_of(one, last) for one in asked], pad_id=0, image_size=image_size)


def published(kind: str, asked: Request) -> dict:
    """The request as transformers' class takes it."""
    given = {"input_ids": asked.ids[None], "attention_mask": torch.ones_like(asked.ids[None])}
    if asked.pixels is None:
        return given
    given["mm_token_type_ids"] = asked.modality[None].int()
    each = list(asked.pixels.split([picture.num_tiles for picture in asked.pictures]))
    for modality, name, grid in ((IMAGE, "pixel_values", "image"), (VIDEO, "pixel_values_videos", "video")):
        mine = [(p.whole, tiles) for p, tiles in zip(asked.pictures, each, strict=True) if p.modality == modality]
        if not mine:
            continue
        given[name] = torch.cat([tiles for _, tiles in mine])
        sizes = [[g.frames, g.rows, g.columns] for g, _ in mine]
        if modality == VIDEO and kind.startswith("qwen3"):  # one grid of all frames of a clip
            sizes = [[len(mine), *sizes[0][1:]]]
        given[f"{grid}_grid_thw"] = torch.tensor(sizes)
        if modality == VIDEO and kind == "qwen2_5_vl":
            given["second_per_grid_ts"] = torch.tensor([g.seconds for g, _ in mine])
    return given


def reference(model, kind: str, asked: Request, max_new_tokens: int) -> list[int]:
    never = [IMAGE_ID, CLIP_ID, *range(TOKENS, VOCAB)]
    return of_transformers(model, published(kind, asked), max_new_tokens, never=never, eos=EOS, pad=PAD)


def section(kind: str, **values) -> QwenSection:
    """The section of a kind, whose family may have one of its own."""
    kinds = ((made, family.kind) for made in LANGUAGE_TARGETS.__args__ for family in made.families.values())
    return next(made for made, own in kinds if own == kind)(kind=kind, **values)
