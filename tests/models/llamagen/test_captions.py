"""Caption cleaning by its rules, and text features of a tiny T5 that do not depend on the batch."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from draftsmith.models.hub import pinned_config
from draftsmith.models.targets.llamagen.captions import TextFeatures, caption_ids, clean_caption, fix
from fails import fails_with
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5EncoderModel

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "circle", "square", "on", "the", "left", "."]
CAPTIONS = ["A red circle on the left.", "a blue square", "", "the the the red red square on a blue circle on a square"]


@pytest.mark.parametrize(
    ("caption", "cleaned"),
    [
        ("  A Red CUBE ", "a red cube"),
        ("a cat+on%20a mat", "a cat on a mat"),  # as in an address
        ("<person> rides", "person rides"),
        ("see https://www.site.com/a-b/c now", "see now"),
        ("see www.site.org now", "see now"),
        ("write to me@mail.com", "write to me"),
        ("by @someone_1 today", "by today"),
        ("a <b>bold</b> cat<br/>", "a bold cat"),
        ("cat<script>var x;</script> and <!-- no --> dog", "cat and dog"),
        ("&lt;b&gt;cat", "cat"),  # uncovered by the first pass, removed by the second
        ("caf&eacute; &amp; bar", "café bar"),
        ("3 < 4", "3 < 4"),
        ("<![abc[ cat", "<! abc cat"),
        ("一只猫 cat ひらがな", "cat ひらがな"),
        ("left – right — far", "left - right - far"),
        ("the “big” «cat»", 'the "big" "cat"'),
        ("cat’s toy", "cat's toy"),
        ("at 192.168.0.12 home", "at home"),
        ("a cat 5:30 ", "a cat 5:30"),  # outer blanks go first, so this rule needs one that is uncovered later
        ("a cat\\na dog", "a cat a dog"),
        ("#12 cat #1234 dog #12345 1234567", "cat 1234 dog"),
        ("my photo_1.JPG here", "my here"),
        ("wow... cat", "wow cat"),
        ("***SALE*** (new) [now] {x|y} cat & dog", "sale new now x y cat dog"),
        ("this-is-my-cute-cat", "this is my cute cat"),
        ("a well-known two-tone cat", "a well-known two-tone cat"),
        ("code jc6640 and jc6640vc and 6640vc231 cat", "code and and cat"),
        ("cat, worldwide free shipping", "cat"),
        ("free download cat", "cat"),
        ("cat click on link", "cat"),
        ("cat png images", "cat"),
        ("cat page 12", "cat"),
        ("poster 10x20 cat 3.5×4", "poster cat"),
        ("red,blue", "red, blue"),
        ("title : cat", "title: cat"),
        ('"a cat"', "a cat"),
        ("- a cat -", "a cat"),
        (".hidden", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_cleaning(caption, cleaned):
    assert clean_caption(caption) == cleaned


def test_mending_gives_one_spelling():
    assert fix("ﬁne Ｗｉｄｅ\u3000x") == "fine Wide x"
    assert fix("e\u0301") == "é"
    assert fix("‚‛ „‟") == '‚\' ""'.replace("‚", "'")
    assert fix("a\r\nb\u2028c\x00\ufeff") == "a\nb\nc"
    assert fix("cat \ud83d") == "cat \ufffd"
    assert fix("½ ² ™") == "½ ² ™", "compatibility forms that are no variants of letters stay"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny T5 encoder with a tokenizer of words, as save_pretrained leaves them."""
    folder = tmp_path_factory.mktemp("t5")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    T5EncoderModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def features(folder) -> TextFeatures:
    return TextFeatures(folder, max_length=12, dtype=torch.float32)


def test_features_have_the_length_of_the_caption(features):
    encoded = features.encode(CAPTIONS)
    # Words and the end mark; the last is cut to 12.
    assert [len(f) for f in encoded] == [8, 4, 1, 12]
    assert all(f.shape[1] == 16 and f.dtype == torch.float32 and not f.requires_grad for f in encoded)
    # They enter training as inputs.
    torch.nn.Linear(16, 2)(encoded[0]).sum().backward()


def test_a_batch_changes_nothing(features):
    together = features.encode(CAPTIONS)
    for caption, expected in zip(CAPTIONS, together, strict=True):
        torch.testing.assert_close(features.encode([caption])[0], expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_padding_is_masked(features):
    """The same as the encoder alone on the bare ids."""
    ids = torch.tensor([[WORDS.index(word) for word in ("a", "blue", "square", "</s>")]])
    expected = features.encoder(input_ids=ids).last_hidden_state[0]
    torch.testing.assert_close(features.encode([CAPTIONS[1]])[0], expected, atol=1e-6, rtol=0)


def test_ids_are_of_the_cleaned_caption(features):
    batch = caption_ids(features.tokenizer, ["<b>A RED</b> circle"], 6)
    words = [WORDS[i] for i in batch["input_ids"][0].tolist()]
    assert words == ["a", "red", "circle", "</s>", "<pad>", "<pad>"]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0]]
    cut = caption_ids(features.tokenizer, [CAPTIONS[3]], 6)["input_ids"][0]
    assert WORDS[cut[-1]] == "</s>", "a cut caption keeps its end mark"


def test_bfloat16_is_the_default(folder):
    assert TextFeatures(folder, max_length=8).encode(["red"])[0].dtype == torch.bfloat16


def test_a_missing_encoder_is_a_user_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    fails_with("cannot load", TextFeatures, tmp_path)


def test_an_encoder_that_lacks_a_layer_is_refused(folder, tmp_path):
    """transformers would draw it at random."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_layers": 3}))
    fails_with(r"do not fit config.json: encoder.block.2.* is missing", TextFeatures, copy)


def test_the_pinned_encoder_is_flan_t5_xl():
    values = pinned_config("flan-t5-xl-encoder")
    with torch.device("meta"):
        encoder = T5EncoderModel(T5Config(**{k: v for k, v in values.items() if k != "model_type"}))
    assert sum(p.numel() for p in encoder.parameters()) == 1_223_527_424
    assert values["d_model"] == 2048


def test_a_language_models_last_states_are_features_and_padding_changes_none(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "lm")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "lm" / name).unlink()
    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                        num_attention_heads=2, pad_token_id=0)  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    model.save_pretrained(tmp_path / "lm")
    features = TextFeatures(tmp_path / "lm", max_length=16, dtype=torch.float32)
    alone, longer = features.encode([CAPTIONS[0]])[0], features.encode([CAPTIONS[0], CAPTIONS[3]])[0]
    assert len(alone) < 16
    ids = caption_ids(features.tokenizer, CAPTIONS[:1], 16)["input_ids"][:, : len(alone)]
    with torch.no_grad():
        expected = model.model(input_ids=ids).last_hidden_state[0]
    torch.testing.assert_close(alone, expected)
    torch.testing.assert_close(longer, expected)
    table = TextFeatures(tmp_path / "lm", max_length=16, dtype=torch.float32, layer=0).encode(CAPTIONS[:1])[0]
    tokens = model.model.embed_tokens.weight.detach()[ids[0]]
    torch.testing.assert_close(table, tokens / tokens.square().mean(-1, keepdim=True).sqrt(), rtol=1e-4, atol=1e-3)
    fails_with("text_layer is 3, and this text encoder has 2 layers", TextFeatures, tmp_path / "lm", layer=3)
    # Many language models' tokenizers pad in front, where positions would count the padding.
    features.tokenizer.padding_side = "left"
    batch = caption_ids(features.tokenizer, CAPTIONS[:1], 16)
    assert batch["attention_mask"][0].tolist() == [1] * len(alone) + [0] * (16 - len(alone))
