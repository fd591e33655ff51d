"""Conversations to ids: one function for training and for decoding, so that both see the same prompt.

Templates are LLaVA-1.5's `plain` (alignment) and `v1` (Vicuna); supervision is a matter of character
spans, mapped to tokens through offsets, never of counting tokens as the official masker does (it
drops every multi-turn sample of a tokenizer in which a blank and `USER` are one piece).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.errors import UserError
from ..core.nouns import IMAGE, TEXT
from ..core.section import Section
from .processor import Processor

IMAGE_MARK = "<image>"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ROLES = {"human": "USER", "gpt": "ASSISTANT"}


class PromptFormat(Section):
    """How a conversation becomes text. Training and decoding must use the same one."""

    template: Literal["plain", "v1"] = "v1"
    # null: the template's own system sentence (official LLaVA); "": none (the HF chat template).
    system: str | None = None
    # llava15 moves every <image> of a turn to its front and keeps one; next moves a single mark only, and is
    # the one for several images; verbatim leaves the text alone.
    image_rule: Literal["llava15", "next", "verbatim"] = "llava15"
    # official: the texts around an image are tokenized on their own, so a lone blank stands on both sides;
    # hf: one pass with <image> as a special token, as llava-hf's processor does.
    image_join: Literal["official", "hf"] = "official"


@dataclass(frozen=True)
class Rendered:
    """A prompt and the character spans in it that are supervised."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoded:
    ids: list[int]
    loss_mask: list[bool]
    modality: list[int]
    text: str


def render(turns: list[dict[str, Any]], form: PromptFormat, *, has_image: bool, open_ended: bool = False) -> Rendered:
    """Text of a conversation and what of it is supervised.

    Args:
        turns: `from`/`value` pairs as in LLaVA JSON; a first turn that is not the human's is dropped.
        open_ended: leave out the last answer, ending where it would begin (for decoding).

    Raises:
        UserError: unknown role, roles that do not alternate, or a sample that `plain` cannot render.
    """
    pairs = [(_role(turn), str(turn["value"])) for turn in turns]
    if form.template == "v1" and pairs and pairs[0][0] != "human":
        pairs = pairs[1:]
    for number, (role, _) in enumerate(pairs):
        if role != ("human", "gpt")[number % 2]:
            raise UserError(f"turn {number} is {role}'s; the roles human and gpt must alternate")
    if has_image:
        pairs = [(role, place_marks(text, form.image_rule)) for role, text in pairs]
    if form.template == "plain":
        return _render_plain(pairs, open_ended)
    return _render_v1(pairs, SYSTEM if form.system is None else form.system, open_ended)


def place_marks(text: str, rule: str) -> str:
    """Where the image marks of one turn stand (LLaVA-1.5's `preprocess_multimodal`, and LLaVA-NeXT's)."""
    count = text.count(IMAGE_MARK)
    if rule == "verbatim" or count == 0:
        return text
    if rule == "next" and (count > 1 or text.startswith(IMAGE_MARK)):
        return text
    rest = text.replace(IMAGE_MARK, "").strip()
    return f"{IMAGE_MARK}\n{rest}".strip()


def _role(turn: dict[str, Any]) -> str:
    role = turn.get("from")
    if role not in ROLES:
        raise UserError(f"unknown role {role!r}", cure="roles are human and gpt")
    return role


def _render_plain(pairs: list[tuple[str, str]], open_ended: bool) -> Rendered:
    if len(pairs) != 2 or IMAGE_MARK not in pairs[0][1]:
        raise UserError(
            "the plain template takes a question with <image> and one answer",
            cure="use template: v1 for this data",
        )
    if open_ended:
        return Rendered(IMAGE_MARK, ())
    text = f"{IMAGE_MARK}{pairs[1][1]}\n"
    return Rendered(text, ((len(IMAGE_MARK), len(text)),))


def _render_v1(pairs: list[tuple[str, str]], system: str, open_ended: bool) -> Rendered:
    text = f"{system} " if system else ""
    spans = []
    last = len(pairs) - 1
    for number, (role, value) in enumerate(pairs):
        text += f"{ROLES[role]}:"
        if open_ended and number == last and role == "gpt":
            break
        if not value:
            continue  # an empty turn is its role and nothing else, not even a blank
        if role == "human":
            text += f" {value} "
            continue
        start = len(text)
        text += f" {value}</s>"
        spans.append((start, len(text)))
    if open_ended and pairs[last][0] == "human":
        text += "ASSISTANT:"
    return Rendered(text, tuple(spans))


def encode(
    turns: list[dict[str, Any]], form: PromptFormat, processor: Processor, *, num_images: int, open_ended: bool = False
) -> Encoded:
    """Ids, supervision and modality of a conversation; image marks are expanded to runs of the image token.

    A token is supervised when its characters lie in an answer's span (everything after the colon of
    `ASSISTANT:` up to and including `</s>`). A prompt for decoding is encoded whole, too: the blank
    before an answer belongs to its first token and is left to the decoder.

    Raises:
        UserError: as `render`; also when the marks do not match the images.
    """
    rendered = render(turns, form, has_image=num_images > 0, open_ended=open_ended)
    marks = rendered.text.count(IMAGE_MARK)
    if marks != num_images:
        cure = "write one <image> mark for each image"
        if form.image_rule == "llava15" and num_images > 1:
            cure += ", and set image_rule: next in the stage's format (llava15 keeps one mark of a turn)"
        raise UserError(f"{marks} <image> marks for {num_images} images", cure=cure)
    pieces = _official_pieces if form.image_join == "official" else _hf_pieces
    ids, loss_mask, modality = [processor.bos_id], [False], [TEXT]
    for token, start, end in pieces(rendered.text, processor):
        if token is None:
            ids += [processor.image_token_id] * processor.num_image_tokens
            loss_mask += [False] * processor.num_image_tokens
            modality += [IMAGE] * processor.num_image_tokens
        else:
            ids.append(token)
            loss_mask.append(any(a <= start and end <= b for a, b in rendered.spans))
            modality.append(TEXT)
    return Encoded(ids, loss_mask, modality, rendered.text)


Piece = tuple[int | None, int, int]  # id (None for an image), first and past-last character


def _official_pieces(text: str, processor: Processor) -> list[Piece]:
    """Each chunk between images is tokenized as if it began a text (so it gets the tokenizer's leading blank)."""
    pieces: list[Piece] = []
    start = 0
    for number, chunk in enumerate(text.split(IMAGE_MARK)):
        if number:
            pieces.append((None, start - len(IMAGE_MARK), start))
        pieces += _tokenize(chunk, start, processor)
        start += len(chunk) + len(IMAGE_MARK)
    return pieces


def _hf_pieces(text: str, processor: Processor) -> list[Piece]:
    return [(None if t == processor.image_token_id else t, a, b) for t, a, b in _tokenize(text, 0, processor)]


def _tokenize(chunk: str, start: int, processor: Processor) -> list[Piece]:
    encoded = processor.tokenizer(chunk, return_offsets_mapping=True, add_special_tokens=False)
    return [(i, start + a, start + b) for i, (a, b) in zip(encoded.input_ids, encoded.offset_mapping, strict=True)]
