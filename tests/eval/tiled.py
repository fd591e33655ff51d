"""Tiny LLaVA-NeXT and LLaVA-OneVision with processors of the real classes, for pictures beyond one tile."""

from pathlib import Path

import numpy as np
import torch
from draftsmith.core.batch import Request
from draftsmith.core.pictures import PatchGrid, Picture, whole_picture
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.families.processor import Processor, Resizing
from draftsmith.data.families.table import PICTURE_FAMILIES
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.llava.model import assemble, llava_config
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, Qwen2Config, SiglipImageProcessorPil, SiglipVisionConfig

SIDE, PATCH = 24, 8  # three patches along a side: odd, as OneVision's 27
VOCAB = 448
TEXTS = ["USER: ASSISTANT:\n", *(f"USER: Which picture is this? ASSISTANT: It is picture {n}." for n in range(10))] * 3
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FORMS = {
    "llava": PromptFormat(system="", image_rule="verbatim"),
    "llava_next": PromptFormat(system="", image_rule="verbatim", image_join="hf"),
    "llava_onevision": PromptFormat(template="qwen", image_rule="verbatim", image_join="hf"),
}
ASPECTS = {"llava": "pad", "llava_next": "anyres", "llava_onevision": "anyres_max_9"}


def processor(family: str) -> Processor:
    """CLIP's image processor and Llama's special tokens; for OneVision SigLIP's and Qwen's."""
    tokenizer = train_tokenizer(TEXTS, 420)
    made = LLAVA.new(tokenizer, image_size=SIDE, patch_size=PATCH, image_mean=MEAN, image_std=STD)
    if family != "llava_onevision":
        return made.of_family(PICTURE_FAMILIES[family])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<video>", "<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    side = {"height": SIDE, "width": SIDE}
    squeeze = SiglipImageProcessorPil(size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3)
    video, end = tokenizer.convert_tokens_to_ids(["<video>", "<|im_end|>"])
    return Processor(
        tokenizer, squeeze, made.image_token_id, PATCH, SIDE, made.pad_id, None, end, made.newline_id,
        PICTURE_FAMILIES[family], video,
    )  # fmt: skip


def token_ids(made: Processor) -> TokenIds:
    return TokenIds(VOCAB, made.image_token_id, 1, made.eos_id, made.pad_id, made.video_token_id)


def model(family: str, seed: int = 0, width: int = 32):
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 512, "initializer_range": 0.25,
    }  # fmt: skip
    tower = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    is_onevision = family == "llava_onevision"
    text = (Qwen2Config if is_onevision else LlamaConfig)(**sizes)
    vision = SiglipVisionConfig(**tower, vision_use_head=False) if is_onevision else CLIPVisionConfig(**tower)
    config = llava_config(
        text, vision, token_ids(processor(family)), vision_feature_layer=-1 if is_onevision else -2,
        family=family,
    )  # fmt: skip
    made = assemble(config).eval()
    # Random towers say little: louder pictures make blindness visible, and a loud newline its absence.
    made.model.multi_modal_projector.linear_2.weight.data *= 40
    if family != "llava":
        made.model.image_newline.data *= 3
    return made


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A different colour at every place."""
    rng = np.random.default_rng([seed, *size])
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def image_picture(size: tuple[int, int], made: Processor, *, min_pixels=None, max_pixels=None) -> Picture:
    """The layout of one image, by its family's own rule."""
    return made.picture_family.layouts([size], made, Resizing(limits=(min_pixels, max_pixels)))[0]


def patches(frames: list[Image.Image], grid: PatchGrid, made: Processor) -> torch.Tensor:
    """Patches of a picture that is read whole."""
    return made.picture_family.clip_pixels(frames, whole_picture(grid), made)


def clip_pictures(clip, settings, made: Processor) -> tuple[Picture, ...]:
    return made.picture_family.clip_layout(clip, settings, made)


def layouts(sizes, made: Processor, aspect, convention="hf") -> tuple[Picture, ...]:
    return made.picture_family.layouts(sizes, made, Resizing(aspect, convention))


def pixels(images: list[Image.Image], made: Processor, aspect, convention="hf") -> torch.Tensor:
    """Tiles of the images of one sample."""
    seen = layouts([image.size for image in images], made, aspect, convention)
    return torch.cat(made.picture_family.pixels(images, seen, made, Resizing(aspect, convention)))


def check_saved(made: Processor, folder: Path, *aspects: str) -> None:
    """A saved processor is read again as it was: its ids, settings and pixels."""
    made.save(folder)
    result = load_processor(folder)
    for name in ("image_token_id", "video_token_id", "vision_start_id", "vision_end_id", "patch_size", "image_size",
                 "pad_id", "eos_id", "newline_id", "family", "patches", "num_image_tokens", "reads_whole",
                 "tokenizer_hash"):  # fmt: skip
        assert getattr(result, name) == getattr(made, name), name
    assert result.tokenizer(TEXTS[1]).input_ids == made.tokenizer(TEXTS[1]).input_ids
    assert made.bos_id in (None, result.bos_id), "a OneVision's is left out here"
    assert type(result.image_processor).__name__.endswith("Pil")
    for aspect in aspects or ("square",):
        for size in ((90, 20), (33, 50)):
            assert layouts([size], result, aspect) == layouts([size], made, aspect)
            assert torch.equal(pixels([picture(size)], result, aspect), pixels([picture(size)], made, aspect))


def check_canvas(size: tuple[int, int], processor: Processor, aspect, *, num_images: int = 1) -> None:
    processor.picture_family.check_canvas(size, processor, aspect, num_images)


def look(made: Processor, sizes: list[tuple[int, int]], aspect: str) -> tuple[torch.Tensor, tuple[Picture, ...]]:
    images = [picture(size, seed) for seed, size in enumerate(sizes)]
    return pixels(images, made, aspect), layouts(sizes, made, aspect)


def clip(made: Processor, frames: int, newline: str = "one_token") -> tuple[torch.Tensor, Picture]:
    images = [picture((SIDE, SIDE), seed) for seed in range(frames)]
    return pixels(images, made, "square"), Picture(made.patches, frames, 2, newline=newline, pooling="bilinear")


def request(
    family: str, sizes: list[tuple[int, int]], *, frames: int = 0, aspect: str | None = None, side_by_side: bool = False
) -> Request:
    """Pictures of the given sizes and one clip, each with its mark; `side_by_side` writes nothing between them."""
    made, tiles, result = processor(family), [], ()
    if sizes:
        seen, result = look(made, sizes, aspect or ASPECTS[family])
        tiles.append(seen)
    if frames:
        seen, layout = clip(made, frames)
        tiles.append(seen)
        result += (layout,)
    marks = ["<image>"] * len(sizes) + ["<video>"] * bool(frames)
    text = ("" if side_by_side else "\n").join(marks) + "\nWhich picture is this?"
    turns = [{"from": "human", "value": text}]
    encoded = encode(turns, FORMS[family], made, pictures=result, open_ended=True)
    modality = torch.tensor(encoded.modality, dtype=torch.int8)
    return Request(torch.tensor(encoded.ids), modality, torch.cat(tiles) if tiles else None, "asked", result)


def published(family: str, asked: Request, sizes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """The same request as transformers' class takes it, its tiles padded to the longest picture's."""
    given: dict[str, torch.Tensor] = {"input_ids": asked.ids[None], "attention_mask": torch.ones_like(asked.ids[None])}
    each = [] if asked.pixels is None else list(asked.pixels.split([p.num_tiles for p in asked.pictures]))
    images = each[: len(sizes)]
    if images:
        most = max(len(tiles) for tiles in images)
        padded = [torch.cat([t, t.new_zeros(most - len(t), *t.shape[1:])]) for t in images]
        given["pixel_values"] = torch.stack(padded)
        given["image_sizes"] = torch.tensor([[height, width] for width, height in sizes])
        if family == "llava_onevision":
            given["batch_num_images"] = torch.tensor([len(images)])
    if len(each) > len(images):
        given["pixel_values_videos"] = each[-1][None]
    return given
