"""Captioners: transformers' own classes at tiny size, saved and loaded as published ones are, and a LLaVA of ours."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from draftsmith.core.batch import Request
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import IMAGE, Picture
from draftsmith.models.drafters.captioners import (
    Blip2Captions,
    BlipCaptions,
    Florence2Captions,
    LvlmCaptioner,
    load_captioner,
)
from draftsmith.models.targets.llava.model import LlavaDecoder
from fails import fails_with
from PIL import Image
from tiny import EOS, IMAGE_ID, PATCHES, TOKENS, llava, reference, request
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    BlipConfig,
    BlipForConditionalGeneration,
    Florence2Config,
    Florence2ForConditionalGeneration,
    OPTConfig,
    PreTrainedTokenizerFast,
)

WORDS = ["What", "does", "the", "image", "describe", "?", "Describe", "in", "detail", "shown", "a", "red", "dot"]
SPECIAL = ("[PAD]", "<s>", "</s>", "[UNK]", "<image>")


def tokenizer():
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *dict.fromkeys(WORDS)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", bos_token="<s>", eos_token="</s>", unk_token="[UNK]",
        additional_special_tokens=["<image>"],
    )  # fmt: skip


TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
         "patch_size": 16, "initializer_range": 0.5}  # fmt: skip


def blip():
    text = {
        "hidden_size": 16, "encoder_hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
        "pad_token_id": 0, "initializer_range": 0.5,
    }  # fmt: skip
    return BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=TOWER, image_text_hidden_size=16))


def blip2():
    qformer = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
               "encoder_hidden_size": 16, "vocab_size": 30, "initializer_range": 0.5}  # fmt: skip
    text = OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=30, word_embed_proj_dim=16,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, init_std=0.5,
    )  # fmt: skip
    config = Blip2Config(
        vision_config=TOWER, qformer_config=qformer, text_config=text, num_query_tokens=3, image_token_index=4
    )
    model = Blip2ForConditionalGeneration(config)
    model.query_tokens.data.normal_()
    model.language_projection.weight.data *= 10
    return model


def florence():
    vision = {"depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1),
              "patch_prenorm": (False, True), "embed_dim": (8, 16), "num_heads": (2, 2), "num_groups": (2, 2),
              "window_size": 2, "projection_dim": 16, "initializer_range": 0.5}  # fmt: skip
    text = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 30,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2,
            "forced_eos_token_id": None, "init_std": 0.5}  # fmt: skip
    return Florence2ForConditionalGeneration(Florence2Config(vision_config=vision, text_config=text, image_token_id=4))


KINDS = {
    "blip": (blip, "BlipImageProcessor", BlipCaptions),
    "blip2": (blip2, "BlipImageProcessor", Blip2Captions),
    "florence2": (florence, "CLIPImageProcessor", Florence2Captions),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder for each kind, as `from_pretrained` wants it."""
    folders = {}
    for kind, (build, images, _) in KINDS.items():
        torch.manual_seed(0)
        folders[kind] = tmp_path_factory.mktemp(kind)
        build().save_pretrained(folders[kind])
        tokenizer().save_pretrained(folders[kind])
        size = {"height": 32, "width": 32}
        made = getattr(transformers, f"{images}Pil", None) or getattr(transformers, images)
        more = {"do_center_crop": False} if kind == "florence2" else {}
        made(size=size, **more).save_pretrained(folders[kind])
    return folders


def pictures(count, seed=0):
    drawn = np.random.default_rng(seed).integers(0, 256, (count, 20, 30, 3), dtype=np.uint8)
    return tuple(Image.fromarray(values).resize((60, 40)) for values in drawn)


def asked(originals):
    ids = torch.tensor([1, *[IMAGE_ID] * PATCHES * len(originals), 7])
    modality = torch.where(ids == IMAGE_ID, IMAGE, 0).to(torch.int8)
    pixels = torch.zeros(len(originals), 3, 16, 16) if originals else None
    return Request(ids, modality, pixels, "r", (Picture(2),) * len(originals), originals=originals)


def load(kind, saved, **more):
    settings = KINDS[kind][2](kind=kind, path=str(saved[kind]), **({"max_new_tokens": 8} | more))
    return load_captioner(settings, torch.device("cpu"))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_captions_of_several_pictures_are_those_of_each(kind, beams, saved):
    captioner = load(kind, saved, num_beams=beams)
    several = pictures(3)
    result = captioner.captions(asked(several))
    assert result == [captioner.captions(asked((picture,)))[0] for picture in several]
    assert len(set(result)) > 1, "pictures make a difference"
    assert all(caption == caption.strip() and not any(s in caption for s in SPECIAL) for caption in result)
    assert captioner.captions(asked(())) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_is_no_part_of_a_caption(kind, saved):
    """What the model says after its prompt, id for id, from its scores alone."""
    captioner = load(kind, saved, max_new_tokens=4, num_beams=1)
    model, (picture,) = captioner.model, pictures(1)
    pixels = captioner.image_processor([picture], return_tensors="pt").pixel_values
    said = []
    with torch.no_grad():
        for _ in range(4):
            if kind == "blip":
                vision = model.vision_model(pixels).last_hidden_state
                scores = model.text_decoder(torch.tensor([[1, *said]]), encoder_hidden_states=vision).logits
            elif kind == "blip2":
                scores = model(pixel_values=pixels, input_ids=torch.tensor([[4, 4, 4, 1, *said]])).logits
            else:
                scores = model(
                    input_ids=captioner.prompt[None], pixel_values=pixels, decoder_input_ids=torch.tensor([[2, *said]])
                ).logits
            said.append(int(scores[0, -1].argmax()))
            if said[-1] == 2:
                break
    expected = captioner.tokenizer.decode(said, skip_special_tokens=True).strip()
    assert captioner.captions(asked((picture,))) == [expected]
    assert expected


def test_florence_is_asked_in_words(saved):
    captioner = load("florence2", saved)
    text = captioner.tokenizer.decode(captioner.prompt)
    assert text.replace("<image>", "").split() == ["<s>", "What", "does", "the", "image", "describe", "?", "</s>"]
    detailed = load("florence2", saved, task="detailed")
    assert "detail" in detailed.tokenizer.decode(detailed.prompt)


def test_mistakes_are_named(saved, tmp_path):
    fails_with("about 1 pictures and given 0", load("blip", saved).captions, replace(asked(pictures(1)), originals=()))
    with pytest.raises(UserError, match="cannot load a captioner"):
        load_captioner(BlipCaptions(kind="blip", path=str(tmp_path / "none")), torch.device("cpu"))
    # Weights of another layout must not leave the model random, silently.
    broken = blip()
    state = {k.replace("vision_model", "eyes"): v for k, v in broken.state_dict().items()}
    broken.save_pretrained(tmp_path, state_dict=state)
    fails_with("lacks weights", load_captioner, BlipCaptions(kind="blip", path=str(tmp_path)), torch.device("cpu"))


# --- a LLaVA of our own ---

PROMPT = [1, 9, *[IMAGE_ID] * PATCHES, 10]


class Numbers:
    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def own(model, stop_ids=(EOS,), limit=12):
    decoder = LlavaDecoder(model, num_token_ids=TOKENS, never=(IMAGE_ID,))
    return LvlmCaptioner(
        decoder, PROMPT, image_token_id=IMAGE_ID, stop_ids=stop_ids, tokenizer=Numbers(), max_new_tokens=limit
    )


def test_a_llava_captions_as_it_generates():
    model, several = llava(3), request(0, 3)
    result = own(model).captions(several)
    for number, caption in enumerate(result):
        ids = torch.tensor(PROMPT)
        one = Request(ids, (ids == IMAGE_ID).to(torch.int8), several.pixels[number : number + 1])
        assert caption == Numbers().decode([t for t in reference(model, one, 12) if t != EOS], True)
    assert len(set(result)) > 1
    assert own(model).captions(request(0, 0)) == []


def test_each_picture_ends_for_itself():
    """An end that only some reach: the others go on, and nothing is kept after it."""
    model, several = llava(3), request(0, 3)
    free = [caption.split() for caption in own(model, stop_ids=()).captions(several)]
    stop = free[0][3]
    ended = [caption.split() for caption in own(model, stop_ids=(int(stop),)).captions(several)]
    assert ended == [words[: words.index(stop)] if stop in words else words for words in free]
    assert ended[0] != free[0]


def test_of_tiles_the_first_and_of_a_clip_the_middle():
    model, generator = llava(3), torch.Generator().manual_seed(0)
    pixels = torch.randn(6, 3, 16, 16, generator=generator)
    layout = (Picture(2), Picture(2, num_tiles=3, modality=2), Picture(2, num_tiles=2))
    result = own(model).captions(Request(torch.tensor([1]), torch.zeros(1, dtype=torch.int8), pixels, "r", layout))
    each = own(model).captions(
        Request(torch.tensor([1]), torch.zeros(1, dtype=torch.int8), pixels[[0, 2, 4]], "r", (Picture(2),) * 3)
    )
    assert result == each
    assert len(set(result)) > 1
