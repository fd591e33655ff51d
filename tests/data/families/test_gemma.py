"""Pictures of Gemma 4: patches and prompts as transformers' own processor makes them."""

import pytest
import torch
from draftsmith.core.pictures import IMAGE, TEXT
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.families.gemma import GEMMA
from draftsmith.data.families.processor import Resizing
from draftsmith.data.media import ImageReader
from draftsmith.data.pictures.videos import VideoSettings
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shapes.tokenizer import train_tokenizer
from fails import fails_with
from PIL import Image
from small_records import talk
from tiled import clip_pictures, image_picture, patches, picture
from transformers import Gemma4ImageProcessorPil

SIZES = [(16, 16), (40, 30), (90, 20), (24, 70), (300, 301), (400, 4), (1, 1)]
TEXTS = ["USER: Which picture? ASSISTANT: It is picture 1.\n", *(f"It is picture {n}." for n in range(10))] * 3
ASKED = talk("<image>\nWhich picture? ", "It is 1.")
FORM = PromptFormat(template="gemma", image_rule="next")


def processor(most: int = 70):
    return GEMMA.new(train_tokenizer(TEXTS, 420), patch_size=4, max_tokens=most)


def ids_of(made, text: str) -> list[int]:
    return made.tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [70, 280])
def test_patches_are_those_of_transformers(size, most):
    made, image = processor(most), picture(size)
    theirs = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=most)
    expected = theirs(images=image, return_tensors="pt")
    layout = image_picture(size, made)
    grid = layout.whole
    assert layout.num_tokens == int(expected["num_soft_tokens_per_image"][0]) <= most
    ours = patches([image], grid, made)
    real = expected["image_position_ids"][0, :, 0] >= 0
    assert (grid.rows, grid.columns) == tuple(int(n) + 1 for n in expected["image_position_ids"][0].amax(0).flip(0))
    torch.testing.assert_close(ours, expected["pixel_values"][0][real].float(), atol=1e-6, rtol=0)


def test_pixels_are_limited_from_above_alone():
    made = processor()
    assert image_picture((64, 64), made).num_tokens == 64
    assert image_picture((64, 64), made, max_pixels=16 * 12 * 12).num_tokens == 16
    assert image_picture((8, 8), made, max_pixels=10**9).num_tokens == 64
    fails_with("as many tokens as they may have", image_picture, (64, 64), made, min_pixels=100)
    assert image_picture((4000, 2), made, max_pixels=12 * 12).num_tokens == 1


def test_a_saved_processor_is_read_again(tmp_path):
    made = processor(140)
    made.save(tmp_path)
    result = load_processor(tmp_path)
    for name in ("image_token_id", "patch_size", "image_size", "pad_id", "bos_id", "eos_id", "newline_id", "family",
                 "num_image_tokens", "reads_whole", "vision_start_id", "vision_end_id", "tokenizer_hash"):  # fmt: skip
        assert getattr(result, name) == getattr(made, name), name
    (ours, theirs) = (image_picture((90, 20), one) for one in (made, result))
    assert ours == theirs
    assert torch.equal(*(patches([picture((90, 20))], ours.whole, one) for one in (made, result)))


def test_a_prompt_is_the_published_template_with_the_pictures_tokens_in_it():
    made = processor()
    layout = image_picture((90, 20), made)
    encoded = encode(ASKED, FORM, made, pictures=[layout])
    shown = f"<|image>{'<|image|>' * layout.num_tokens}<image|>"
    asked = f"<|turn>user\n{shown}Which picture?<turn|>\n<|turn>model\n"
    answer = "It is 1.<turn|>"
    assert encoded.ids == [made.bos_id, *ids_of(made, f"{asked}{answer}\n")]
    assert [m for m in encoded.modality if m != TEXT] == [IMAGE] * layout.num_tokens
    supervised = [i for i, kept in zip(encoded.ids, encoded.loss_mask, strict=True) if kept]
    assert made.tokenizer.decode(supervised).strip() == answer and supervised[-1] == made.eos_id
    prompt = encode(ASKED[:1], FORM, made, pictures=[layout], open_ended=True)
    assert prompt.ids == [made.bos_id, *ids_of(made, asked)]


def test_a_system_sentence_and_several_pictures():
    made = processor()
    one, two = image_picture((90, 20), made), image_picture((16, 40), made)
    form = PromptFormat(template="gemma", image_rule="next", system="Be brief.")
    both = [{"from": "human", "value": "<image> or <image>?"}]
    encoded = encode(both, form, made, pictures=[one, two], open_ended=True)
    assert sum(m == IMAGE for m in encoded.modality) == one.num_tokens + two.num_tokens
    assert encoded.text.startswith("<|turn>system\nBe brief.<turn|>\n<|turn>user\n<|image>")
    fails_with("2 <image> marks for 1", encode, both, form, made, pictures=[one], open_ended=True)
    fails_with("use template: gemma", encode, both, PromptFormat(template="plain"), made, pictures=[one, two])


def test_records_are_read_by_the_familys_own_rule_whatever_the_aspect(folder):
    made = processor()
    Image.new("RGB", (90, 20)).save(folder / "images" / "wide.png")
    for aspect in ("pad", "square", "anyres"):
        reader = ImageReader(made, Resizing(aspect), VideoSettings())
        media = reader.media({"image": "wide.png", "conversations": ASKED}, folder / "images", folder)
        assert len(media.pixels()) == sum(p.num_tiles for p in media.pictures)
        assert media.pictures == (image_picture((90, 20), made),)


def test_clips_and_other_tokenizers_are_refused():
    fails_with("read images alone", clip_pictures, None, VideoSettings(), processor())
    tokenizer = train_tokenizer(TEXTS, 420)
    made = GEMMA.new(tokenizer, patch_size=4)
    assert made.tokenizer.eos_token == "<turn|>" and made.num_image_tokens == 1
