"""Pictures of InternVL, Mistral 3, Pixtral and Gemma 4: tiles, patches and prompts as transformers makes them."""

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import IMAGE, TEXT, VIDEO, Picture
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.families.gemma import GEMMA
from draftsmith.data.families.internvl import INTERNVL
from draftsmith.data.families.mistral import PIXTRAL
from draftsmith.data.families.processor import Resizing
from draftsmith.data.media import ImageReader
from draftsmith.data.pictures.videos import VideoSettings
from draftsmith.data.shapes.tokenizer import train_tokenizer
from fails import fails_with
from PIL import Image
from small_records import talk
from tiled import check_saved, clip_pictures, image_picture, patches, picture
from transformers import Gemma4ImageProcessorPil, GotOcr2ImageProcessorPil, PixtralImageProcessorPil

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(16, 16), (40, 30), (90, 20), (24, 70), (33, 33), (300, 301), (17, 16), (1, 1)]
TEXTS = ["USER: Which picture? ASSISTANT: It is picture 1.\n", *(f"It is picture {n}." for n in range(10))] * 3
ASKED = talk("<image>\nWhich picture?", "It is 1.")


def internvl(**settings):
    return INTERNVL.new(
        train_tokenizer(TEXTS, 420), image_size=16, patch_size=4, image_mean=MEAN, image_std=STD, **settings
    )


def pixtral(merge: int):
    kind = "mistral3" if merge == 2 else "pixtral"
    tokenizer = train_tokenizer(TEXTS, 420)
    return PIXTRAL.new(tokenizer, kind, patch_size=4, image_size=64, image_mean=MEAN, image_std=STD)


def gemma(most: int = 70):
    return GEMMA.new(train_tokenizer(TEXTS, 420), patch_size=4, max_tokens=most)


def made(kind: str):
    if kind == "gemma4":
        return gemma()
    return internvl() if kind == "internvl" else pixtral(2 if kind == "mistral3" else 1)


KINDS = ("internvl", "mistral3", "pixtral", "gemma4")
TEMPLATES = {"internvl": "internvl", "mistral3": "mistral", "pixtral": "mistral", "gemma4": "gemma"}
every_kind = pytest.mark.parametrize("kind", KINDS)


def ids_of(processor, text: str) -> list[int]:
    return processor.tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [1, 4, 12])
def test_tiles_are_those_of_transformers(size, most):
    processor, image = internvl(max_tiles=most), picture(size)
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, image_mean=MEAN, image_std=STD, crop_to_patches=True, max_patches=most
    )
    expected = theirs(images=image, return_tensors="pt")
    (layout,), pixels = read(processor, size)
    assert layout.num_tiles == int(expected["num_patches"][0]) and layout.num_tokens == 4 * layout.num_tiles
    torch.testing.assert_close(pixels, expected["pixel_values"].float())


def test_limits_of_pixels_are_limits_of_tiles():
    processor, area = internvl(), 16 * 16

    def grid(size, *limits):
        return processor.picture_family.grid(size, processor, Resizing(limits=limits))

    assert grid((160, 16), None, None) == (10, 1) and grid((160, 16), None, 5 * area + 1) == (5, 1)
    assert grid((160, 16), None, 1) == (1, 1) and grid((16, 16), 3 * area, None) == (2, 2)
    fails_with("at least 4 and at most 2 tiles", grid, (16, 16), 4 * area, 2 * area)


@pytest.mark.parametrize("size", [*SIZES, (400, 4)])
@pytest.mark.parametrize("most", [70, 280])
def test_gemmas_patches_are_those_of_transformers(size, most):
    processor, image = gemma(most), picture(size)
    theirs = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=most)
    expected = theirs(images=image, return_tensors="pt")
    layout = image_picture(size, processor)
    grid = layout.whole
    assert layout.num_tokens == int(expected["num_soft_tokens_per_image"][0]) <= most
    real = expected["image_position_ids"][0, :, 0] >= 0
    assert (grid.rows, grid.columns) == tuple(int(n) + 1 for n in expected["image_position_ids"][0].amax(0).flip(0))
    ours = patches([image], grid, processor)
    torch.testing.assert_close(ours, expected["pixel_values"][0][real].float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["mistral3", "pixtral"])
def test_patches_are_those_of_transformers(kind, size):
    processor, image = made(kind), picture(size)
    side, unit = processor.patch_size, processor.image_size
    theirs = PixtralImageProcessorPil(size={"longest_edge": 64}, image_mean=MEAN, image_std=STD)
    expected = theirs(images=image, patch_size={"height": unit, "width": unit}, return_tensors="pt")
    layout = image_picture(size, processor)
    grid = layout.whole
    assert (grid.rows * side, grid.columns * side) == tuple(int(n) for n in expected["image_sizes"][0])
    ours = patches([image], grid, processor).view(grid.rows, grid.columns, 3, side, side)
    image = ours.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    torch.testing.assert_close(image, expected["pixel_values"][0].float(), atol=1e-5, rtol=0)


def test_pixels_of_a_picture_that_is_read_whole_are_limited_from_above_alone():
    processor = pixtral(2)
    assert image_picture((64, 64), processor, max_pixels=32 * 32).num_tokens == 16
    assert image_picture((8, 8), processor, max_pixels=32 * 32).num_tokens == 1
    fails_with("only ever made smaller", image_picture, (64, 64), processor, min_pixels=100)
    fails_with("200 times the other", image_picture, (4000, 4), processor)
    processor = gemma()
    assert image_picture((64, 64), processor).num_tokens == 64
    assert image_picture((64, 64), processor, max_pixels=16 * 12 * 12).num_tokens == 16
    assert image_picture((8, 8), processor, max_pixels=10**9).num_tokens == 64
    fails_with("as many tokens as they may have", image_picture, (64, 64), processor, min_pixels=100)
    assert image_picture((4000, 2), processor, max_pixels=12 * 12).num_tokens == 1


@every_kind
def test_a_saved_processor_is_read_again(kind, tmp_path):
    check_saved(made(kind), tmp_path)


def read(processor, size):
    layouts = (image_picture(size, processor),)
    (pixels,) = processor.picture_family.pixels([picture(size)], layouts, processor, Resizing())
    return layouts, pixels


@every_kind
def test_a_prompt_is_the_published_template_with_the_pictures_tokens_in_it(kind):
    processor = made(kind)
    (layout,), _ = read(processor, (90, 20))
    form = PromptFormat(template=TEMPLATES[kind])
    encoded = encode(ASKED, form, processor, pictures=[layout])
    if kind == "internvl":
        shown = f"<img>{'<IMG_CONTEXT>' * layout.num_tokens}</img>"
        asked = f"<|im_start|>user\n{shown}\nWhich picture?<|im_end|>\n<|im_start|>assistant\n"
        answer, behind = "It is 1.<|im_end|>", "\n"
    elif kind == "gemma4":
        shown = f"<|image>{'<|image|>' * layout.num_tokens}<image|>"
        asked = f"<|turn>user\n{shown}Which picture?<turn|>\n<|turn>model\n"
        answer, behind = "It is 1.<turn|>", "\n"
    else:
        _, rows, columns = layout.whole.of_tokens
        shown = "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"
        asked, answer, behind = f"[INST]{shown}Which picture?[/INST]", "It is 1.</s>", ""
    first = [processor.bos_id]  # of this tokenizer
    expected = [*first, *ids_of(processor, asked + answer + behind)]
    assert encoded.ids == expected
    assert [m for m in encoded.modality if m != TEXT] == [IMAGE] * layout.num_tokens
    assert [i for i, m in zip(encoded.ids, encoded.modality, strict=True) if m == IMAGE] == [
        processor.image_token_id
    ] * layout.num_tokens
    supervised = [i for i, kept in zip(encoded.ids, encoded.loss_mask, strict=True) if kept]
    assert processor.tokenizer.decode(supervised).strip() == answer and supervised[-1] == processor.eos_id
    prompt = encode(ASKED[:1], form, processor, pictures=[layout], open_ended=True)
    assert prompt.ids == [*first, *ids_of(processor, asked)]


@every_kind
def test_several_pictures_and_marks_that_do_not_match(kind):
    processor = made(kind)
    (one,), _ = read(processor, (90, 20))
    (two,), _ = read(processor, (16, 40))
    form = PromptFormat(template=TEMPLATES[kind], image_rule="next", system="Be brief.")
    both = [{"from": "human", "value": "<image> or <image>?"}]
    encoded = encode(both, form, processor, pictures=[one, two], open_ended=True)
    assert sum(m == IMAGE for m in encoded.modality) == one.num_tokens + two.num_tokens
    assert "Be brief." in encoded.text
    for pictures, numbers in (([one], "2 <image> marks for 1"), ([one, two, two], "2 <image> marks for 3")):
        refused = fails_with("", encode, both, form, processor, pictures=pictures, open_ended=True)
        assert kind != "internvl" or numbers in str(refused)
        assert "<image> marks for" in str(refused)
    other = PromptFormat(template={"internvl": "qwen", "gemma4": "plain"}.get(kind, "v1"))
    fails_with(f"use template: {form.template}", encode, both, other, processor, pictures=[one, two])


def test_frames_of_a_clip_are_numbered_tiles():
    processor, clip = internvl(), Picture(2, 3, VIDEO)
    form = PromptFormat(template="internvl")
    asked = [{"from": "human", "value": "<video>\nWhat happens?"}]
    encoded = encode(asked, form, processor, pictures=[clip], open_ended=True)
    run = "<IMG_CONTEXT>" * 4
    frames = "\n".join(f"Frame{n}: <img>{run}</img>" for n in (1, 2, 3))
    text = f"<|im_start|>user\n{frames}\nWhat happens?<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.ids == [processor.bos_id, *ids_of(processor, text)]
    assert [m for m in encoded.modality if m != TEXT] == [VIDEO] * 12


@every_kind
def test_records_are_read_by_the_familys_own_rule_whatever_the_aspect(kind, folder):
    processor = made(kind)
    Image.new("RGB", (90, 20)).save(folder / "images" / "wide.png")
    record = {"image": "wide.png", "conversations": ASKED}
    for aspect in ("pad", "square", "anyres"):
        reader = ImageReader(processor, Resizing(aspect), VideoSettings())
        media = reader.media(record, folder / "images", folder)
        pixels = media.pixels()
        assert len(pixels) == sum(p.num_tiles for p in media.pictures)
        assert media.pictures == read(processor, (90, 20))[0]


@pytest.mark.parametrize("kind", ["mistral3", "gemma4"])
def test_clips_are_refused_where_images_alone_are_read(kind):
    fails_with("read images alone", clip_pictures, None, VideoSettings(), made(kind))


def test_a_system_sentence_needs_its_tokens():
    processor = pixtral(1)
    form = PromptFormat(template="mistral", system="Be brief.")
    text = encode(ASKED[:1], form, processor, pictures=[image_picture((8, 8), processor)], open_ended=True).text
    assert text.startswith("[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]")
    processor.tokenizer.get_vocab = lambda: {"[INST]": 1}
    with pytest.raises(UserError, match=r"no \[SYSTEM_PROMPT\] token"):
        encode(ASKED[:1], form, processor, pictures=[image_picture((8, 8), processor)], open_ended=True)
