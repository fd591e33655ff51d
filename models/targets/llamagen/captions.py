"""Captions as text-conditional LlamaGen reads them: cleaned twice, then the states of a T5 encoder, or of a language
model where a small generator has one.

The cleaning is the one that the published models were trained with (DeepFloyd's, made for captions from the web), so a
prompt that skips it is another prompt. The rules are its rules; its two libraries are the standard library's here,
always: Python's HTML parser for BeautifulSoup, and `fix` for ftfy, which leaves out terminal escapes and the repair of
wrongly decoded text (the text is lower-case by then, which spoils most such sequences anyway).
Letters: n tokens of a caption, F width of the encoder.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.errors import UserError
from ....core.placement import onto
from ....core.pretrained import reading_pretrained
from ...hub import load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextFeatures:
    """A frozen T5 encoder, or a language model, with its tokenizer. Raises `UserError`: one cannot be loaded.

    Args:
        source: Hub id (google/flan-t5-xl for the published models) or a directory of `save_pretrained`.
        max_length: ids that a caption is cut to, the end mark included; the model's condition tokens.
        dtype: bfloat16 for Flan-T5-XL, as published.
        layer: of whose states features are, each scaled to a root mean square of 1; 0 is the table of tokens. None: the
            last states, as they are.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        max_length: int = 120,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        layer: int | None = None,
    ):
        from transformers import AutoTokenizer

        with reading_pretrained(source, "cannot load the text encoder", hint=_CURE):
            self.tokenizer = AutoTokenizer.from_pretrained(source)
        encoder = load_text_encoder(source, dtype=dtype, device=device)
        self.encoder = encoder.eval().requires_grad_(False)
        self.max_length, self.layer = max_length, layer
        if layer is not None and layer > (depth := encoder.config.num_hidden_layers):
            problem = f"text_layer is {layer}, and this text encoder has {depth} layers"
            raise UserError(problem, where=str(source), hint=f"give 0 to {depth}")

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Tensor]:
        """Features [n,F] of each caption, without padding, in the encoder's type and on its device.

        Padding is masked and always to `max_length`, so that a caption's features do not depend on its neighbours.
        """
        batch = caption_ids(self.tokenizer, captions, self.max_length).to(self.encoder.device)
        known, wanted = {name: batch[name] for name in ("input_ids", "attention_mask")}, self.layer
        output = self.encoder(**known, output_hidden_states=wanted is not None)
        states = output.last_hidden_state
        if wanted is not None:
            states = F.rms_norm(output.hidden_states[wanted], states.shape[-1:])
        return [row[mask.bool()].clone() for row, mask in zip(states, batch["attention_mask"], strict=True)]


_CURE = "check the name and the network, or download it once and give the local directory"


def load_text_encoder(source: str | Path, *, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """A T5 encoder all of whose weights were read: transformers draws a missing one at random. Of another model its
    layers: a language model's padding, behind the caption, is seen by nothing. `device`: where to; None: the CPU.
    Raises `UserError`: it cannot be read, lacks a weight, or has one that is not finite.
    """
    import transformers

    with reading_pretrained(source, "cannot load the text encoder", hint=_CURE):
        is_t5 = isinstance(transformers.AutoConfig.from_pretrained(source), transformers.T5Config)
    encoders: Any = transformers.T5EncoderModel if is_t5 else transformers.AutoModel
    # The decoder's weights in a full T5 are left out.
    return load_pretrained(encoders.from_pretrained, source, dtype=dtype, **onto(device))


def caption_ids(tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], max_length: int) -> Any:
    """`input_ids` and `attention_mask` [B,max_length] of cleaned captions, with the tokenizer's special ids."""
    cleaned = [clean_caption(caption) for caption in captions]
    return tokenizer(
        cleaned,
        max_length=max_length,
        padding="max_length",
        padding_side="right",
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )


def clean_caption(caption: str) -> str:
    """The published cleaning, which runs twice: what the first pass uncovers (escaped markup) the second removes."""
    return _clean_once(_clean_once(caption))


Rule = tuple[re.Pattern[str], str]


def _rules(*pairs: tuple[str, str]) -> list[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


_DOMAIN = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_FILE_ENDING = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
_DASHES = (
    "\\u002d\\u058a\\u05be\\u1400\\u1806\\u2010-\\u2015\\u2e17\\u2e1a\\u2e3a\\u2e3b\\u2e40"
    "\\u301c\\u3030\\u30a0\\ufe31\\ufe32\\ufe58\\ufe63\\uff0d"
)
_PUNCTUATION = r"[#®•©™&@·º½¾¿¡§~)(\][}{|\\/*]+"

_ADDRESSES = _rules(
    ("<person>", "person"),
    (rf"\b(?:https?:(?:/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN})", ""),
)
_CHARACTERS = _rules(
    (r"@\w+\b", ""),  # nicknames
    ("[\\u31c0-\\u9fff]+", ""),  # from CJK strokes to unified ideographs; kana and Hangul stay
    (f"[{_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"(?:\d{1,3}\.){3}\d{1,3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),  # an article's number at the end
    (r"\\n", " "),  # a line break spelt out
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.{_FILE_ENDING}", ""),
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (_PUNCTUATION, " "),
    (r"\s+\.\s+", " "),
)
_PHRASES = _rules(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # codes of articles: jc6640
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),  # jc6640vc
    (r"\b\d+[a-zA-Z]+\d+\b", ""),  # 6640vc231
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{_FILE_ENDING}(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes, with a Latin x, a Cyrillic one or a sign
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),  # a blank after punctuation
    (r"\s+", " "),
    (r"""^["']([\w\W]+)["']$""", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)
_JOINTS = re.compile("[-_]")


def _clean_once(caption: str) -> str:
    text = _apply(_ADDRESSES, unquote_plus(caption).strip().lower())
    text = _apply(_CHARACTERS, _without_markup(text))
    # Words joined like a-file-name become words again; a hyphen or three are left alone.
    if len(_JOINTS.findall(text)) > 3:
        text = _JOINTS.sub(" ", text)
    text = html.unescape(html.unescape(fix(text))).strip()
    return _apply(_PHRASES, text).strip()


def _apply(rules: list[Rule], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


# Latin ligatures and digraphs, the ideographic blank, and full- and half-width forms.
_VARIANTS = re.compile("[Ĳĳŉ\u3000Ǆ-ǌǱ-ǳ\ufb00-\ufb06\uff01-\uffef]")


def fix(text: str) -> str:
    """One spelling for characters that look alike: NFC, no ligatures, no wide or narrow forms, straight quotes, plain
    line ends; no control characters and no halves of surrogate pairs."""
    text = _VARIANTS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = re.sub("[\\u02bc\\u2018-\\u201b]", "'", re.sub("[\\u201c-\\u201f]", '"', text))
    text = re.sub("\\r\\n|[\\r\\u2028\\u2029\\x85]", "\n", text)
    text = re.sub("[\\x00-\\x08\\x0b\\x0e-\\x1f\\x7f\\u206a-\\u206f\\ufeff\\ufff9-\\ufffc]", "", text)
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return unicodedata.normalize("NFC", text)


class _Text(HTMLParser):
    """Collects what a page would show."""

    HIDDEN = frozenset({"script", "style", "template", "rt", "rp"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.HIDDEN:
            self.hidden.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.hidden:
            self.hidden.remove(tag)

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.pieces.append(data)


def _without_markup(text: str) -> str:
    parser = _Text()
    try:
        parser.feed(text)
        parser.close()
    except AssertionError:  # the parser's word for a declaration that it does not know, as in "<![abc["
        return text
    return "".join(parser.pieces)


def ids_of_sample(tokenizer: PreTrainedTokenizerBase, num_tokens: int, sample: Any) -> Tensor:
    """Ids [t] of a sample's caption, for a text encoder that is trained along."""
    batch = caption_ids(tokenizer, [sample.info["caption"]], num_tokens)
    return batch["input_ids"][0][batch["attention_mask"][0].bool()]
