"""Conversations to ids: one function for training and for decoding, so that both see the same prompt.

Templates are LLaVA-1.5's `plain` (alignment) and `v1` (Vicuna), LLaVA-OneVision's `qwen`, Qwen-VL's `qwen_vl`,
InternVL's `internvl`, Mistral's `mistral`, Gemma 4's `gemma`, Llama-3's `llama3`, and the target's own (`chat`,
chat_template.py); supervision is a matter of character spans, mapped to tokens through offsets, never of counting
tokens as the official masker does (it drops every multi-turn sample of a tokenizer in which a blank and `USER` are one
piece).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from ..core.errors import UserError
from ..core.pictures import TEXT, VIDEO, Picture
from ..core.section import Section
from .chat_template import SYSTEM_ROLES, render_chat
from .families.processor import QWEN, Processor
from .pictures.picture_marks import MARKS, VIDEO_MARK, mark_of, place_marks, runs_of, write_marks, written_marks
from .text_pieces import check_length, hf_pieces, official_pieces

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
QWEN_SYSTEM = "You are a helpful assistant."
ROLES = {"human": "USER", "gpt": "ASSISTANT"}


@dataclass(frozen=True)
class _Chat:
    """A template whose turns begin with a head of their role.

    Args:
        head: what begins a turn, with {} for its role.
        between: what stands after a turn's end.
        system: the template's own system sentence.
        answers: what it calls who answers.
    """

    head: str
    end: str
    between: str
    system: str
    answers: str = "assistant"


_CHATS = {
    "qwen": _Chat("<|im_start|>{}\n", "<|im_end|>", "\n", QWEN_SYSTEM),
    "qwen_vl": _Chat("<|im_start|>{}\n", "<|im_end|>", "\n", QWEN_SYSTEM),
    "internvl": _Chat("<|im_start|>{}\n", "<|im_end|>", "\n", ""),
    "gemma": _Chat("<|turn>{}\n", "<turn|>", "\n", "", "model"),
    "llama3": _Chat("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "", ""),
}
# Template -> families whose pictures stand between tokens of their own, which it writes.
_WRITES: dict[str, tuple[str, ...]] = {"qwen_vl": QWEN, "internvl": ("internvl",), "mistral": ("pixtral",),
                                       "gemma": ("gemma4",)}  # fmt: skip
_TURN_END = {"v1": "</s>", "mistral": "</s>"} | {name: chat.end for name, chat in _CHATS.items()}


class PromptFormat(Section):
    """How a conversation becomes text. Training and decoding must use the same one."""

    # plain: alignment; v1: targets with Llama's tokenizer; qwen: LLaVA-OneVision with Qwen2's (its qwen_1_5); qwen_vl:
    # Qwen2-VL, Qwen2.5-VL and Qwen3-VL; internvl: InternVL 3; mistral: Mistral 3 and Pixtral; gemma: Gemma 4,
    # without its channel of thoughts; llama3: text-only targets of Llama-3; chat: the chat template in the target's own
    # files, as servers use it, with each record's system message, tools, tool calls and reasoning (for logs).
    template: Literal["plain", "v1", "qwen", "qwen_vl", "internvl", "mistral", "gemma", "llama3", "chat"] = "v1"
    # null: the template's own system sentence (official LLaVA; Qwen2-VL's and Qwen2.5-VL's; the others have none:
    # Mistral's published one names a date; chat: what the target's template writes); "": none. A record's own system
    # message takes its place.
    system: str | None = None
    # llava15 moves every mark of a turn to its front and keeps one; next moves a single mark only, and is
    # the one for several images; verbatim leaves the text alone. Template chat has verbatim, the served order.
    image_rule: Literal["llava15", "next", "verbatim"] = "llava15"
    # official: the texts around an image are tokenized on their own, so a lone blank stands on both sides;
    # hf: one pass with <image> as a special token, as llava-hf's processor does.
    image_join: Literal["official", "hf"] = "official"
    # In requests, the text after an answer that another turn follows: end, the end token as in training; blank, as in
    # the second turns of TABED's released code.
    answer_end: Literal["end", "blank"] = "end"

    @model_validator(mode="before")
    @classmethod
    def _served(cls, values: Any) -> Any:
        """The order of a message's pictures and texts is a part of what was served."""
        is_chat = isinstance(values, dict) and values.get("template") == "chat"
        return {"image_rule": "verbatim"} | values if is_chat else values

    @model_validator(mode="after")
    def _honoured(self) -> PromptFormat:
        if self.template == "chat" and (self.system is not None or self.image_rule != "verbatim"):
            key = "system" if self.system is not None else "image_rule"
            raise ValueError(f"template chat writes what the server wrote: leave {key} out, found {getattr(self, key)}")
        if self.answer_end == "blank" and self.template != "v1":
            raise ValueError(f"answer_end: blank is of template v1, found {self.template}")
        return self


@dataclass(frozen=True)
class Rendered:
    """A prompt and the character spans in it that are supervised."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoded:
    """A tokenized conversation: T ids with their loss mask and modality, and the text that they came from."""

    ids: list[int]
    loss_mask: list[bool]
    modality: list[int]
    text: str


def render(
    turns: list[dict[str, Any]],
    form: PromptFormat,
    *,
    has_image: bool,
    has_clip: bool = False,
    open_ended: bool = False,
    written: Sequence[str] = (),
    family: str = "",
) -> Rendered:
    """Text of a conversation and what of it is supervised.

    Args:
        turns: `from`/`value` pairs as in LLaVA JSON; a first turn that is not the human's is dropped.
        has_image: there are images or clips, whose marks are placed.
        has_clip: <video> is a mark, too.
        written: of a template that surrounds pictures, what each mark is written as (`written_marks`).
        family: of the processor; Qwen3-VL has no system sentence of its own.
        open_ended: leave out the last answer, ending where it would begin (for decoding).

    Raises:
        UserError: unknown role, roles that do not alternate, or a sample that `plain` cannot render.
    """
    system, turns = _own_system(turns, form)
    pairs = [(_role(turn, form), str(turn["value"])) for turn in turns]
    if form.template != "plain" and pairs and pairs[0][0] != "human":
        pairs = pairs[1:]
    for number, (role, _) in enumerate(pairs):
        if role != ("human", "gpt")[number % 2]:
            raise UserError(f"turn {number} is {role}'s; the roles human and gpt must alternate")
    if has_image:
        pairs = [(role, place_marks(text, form.image_rule, has_clip=has_clip)) for role, text in pairs]
    if form.template == "plain":
        return _render_plain(pairs, open_ended, MARKS[has_clip])
    if form.template == "v1":
        end = " " if open_ended and form.answer_end == "blank" else "</s>"
        return _render_v1(pairs, SYSTEM if system is None else system, open_ended, end)
    if form.template == "mistral":
        return _render_mistral(write_marks(pairs, written, MARKS[has_clip], keeps_breaks=False), system, open_ended)
    chat = _CHATS[form.template]
    if form.template in _WRITES:
        # The line break beside a mark is LLaVA's way of writing; InternVL has one, too.
        pairs = write_marks(pairs, written, MARKS[has_clip], keeps_breaks=form.template == "internvl")
    if form.template in ("llama3", "gemma"):
        pairs = [(role, value.strip()) for role, value in pairs]
    own = "" if family == "qwen3_vl" else chat.system
    return _render_chat(pairs, chat, own if system is None else system, open_ended)


def _own_system(turns: list[dict[str, Any]], form: PromptFormat) -> tuple[str | None, list[dict[str, Any]]]:
    """The system message, a record's own one before the format's, and the turns after it."""
    if not turns or turns[0].get("from") not in SYSTEM_ROLES:
        return form.system, turns
    if form.template == "plain":
        raise _needs_chat("a system message", form)
    return str(turns[0]["value"]), turns[1:]


def _role(turn: dict[str, Any], form: PromptFormat) -> str:
    role = turn.get("from")
    if role == "tool" or turn.get("tool_calls"):
        raise _needs_chat("a tool's turn or call", form)
    if turn.get("reasoning"):
        raise _needs_chat("reasoning", form)
    if role not in ROLES:
        raise UserError(f"unknown role {role!r}", hint="roles are human and gpt")
    return role


def _needs_chat(what: str, form: PromptFormat) -> UserError:
    hint = "set format: {template: chat}, the target's own chat template"
    return UserError(f"the record has {what}, and template {form.template} writes none", hint=hint)


def _render_plain(pairs: list[tuple[str, str]], open_ended: bool, marks: re.Pattern[str]) -> Rendered:
    if len(pairs) != 2 or (mark := marks.search(pairs[0][1])) is None:
        raise UserError(
            "the plain template takes a question with <image> and one answer",
            hint="use template: v1 for this data",
        )
    if open_ended:
        return Rendered(mark[0], ())
    text = f"{mark[0]}{pairs[1][1]}\n"
    return Rendered(text, ((len(mark[0]), len(text)),))


def _render_v1(pairs: list[tuple[str, str]], system: str, open_ended: bool, end: str) -> Rendered:
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
        text += f" {value}{end}"
        spans.append((start, len(text)))
    if open_ended and pairs[last][0] == "human":
        text += "ASSISTANT:"
    return Rendered(text, tuple(spans))


def _render_chat(pairs: list[tuple[str, str]], chat: _Chat, system: str, open_ended: bool) -> Rendered:
    """Supervises each answer and the token that ends it; Qwen's official masker also takes a turn's outer tokens."""
    text = chat.head.format("system") + system + chat.end + chat.between if system else ""
    spans, last = [], len(pairs) - 1
    for number, (role, value) in enumerate(pairs):
        text += chat.head.format("user" if role == "human" else chat.answers)
        if open_ended and number == last and role == "gpt":
            break
        start = len(text)
        text += f"{value}{chat.end}"
        if role == "gpt" and value:
            spans.append((start, len(text)))
        text += chat.between
    if open_ended and pairs[last][0] == "human":
        text += chat.head.format(chat.answers)
    return Rendered(text, tuple(spans))


def _render_mistral(pairs: list[tuple[str, str]], system: str | None, open_ended: bool) -> Rendered:
    text = f"[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT]" if system else ""
    spans, last = [], len(pairs) - 1
    for number, (role, value) in enumerate(pairs):
        if role == "human":
            text += f"[INST]{value}[/INST]"
        elif open_ended and number == last:
            break
        elif value:
            start = len(text)
            text += f"{value}</s>"
            spans.append((start, len(text)))
    return Rendered(text, tuple(spans))


def encode(
    turns: list[dict[str, Any]],
    form: PromptFormat,
    processor: Processor,
    *,
    num_images: int = 0,
    pictures: Sequence[Picture] = (),
    open_ended: bool = False,
    record: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> Encoded:
    """Ids, supervision and modality of a conversation; marks are expanded to runs of the image or video token.

    A token is supervised when its characters lie in an answer's span (everything after the colon of
    `ASSISTANT:` up to and including `</s>`). A prompt for decoding is encoded whole, too: the blank
    before an answer belongs to its first token and is left to the decoder.

    Args:
        pictures: of the images and clips, in the order of their marks.
        num_images: in place of `pictures`, so many images of one tile each.
        record: that the turns are of: template chat reads its `tools` and `chat_template_kwargs`.
        most: ids; text that has far more is not tokenized whole. None: it is, however long.

    Raises:
        TooLong: its beginning alone has more than twice `most` ids.
        UserError: as `render` and `render_chat`; also when the marks do not match the pictures, or the template the
            tokenizer.
    """
    check_template(form, processor)
    assert not (num_images and processor.reads_whole), "a picture that is read whole has tokens of its own number"
    pictures = pictures or [Picture(math.isqrt(processor.num_image_tokens))] * num_images
    has_clip = any(picture.modality == VIDEO for picture in pictures)
    family, record = processor.family, record or {}
    if form.template == "chat":
        writes = any(family in families for families in _WRITES.values())
        written = written_marks(pictures, family) if writes else [mark_of(picture) for picture in pictures]
        text, spans = render_chat(
            turns, processor.tokenizer, record, family=family, written=written, open_ended=open_ended
        )
        rendered = Rendered(text, spans)
    else:
        if record.get("tools") or record.get("chat_template_kwargs"):
            raise _needs_chat("tools" if record.get("tools") else "chat_template_kwargs", form)
        writes = form.template in _WRITES
        written = written_marks(pictures, family) if writes else []
        rendered = render(
            turns, form, has_image=len(pictures) > 0, has_clip=has_clip, open_ended=open_ended, written=written,
            family=family,
        )  # fmt: skip
        rendered = Rendered(rendered.text, _learned(turns, rendered.spans, open_ended))
    marks = MARKS[has_clip]
    runs = [(picture, length) for picture in pictures for length in runs_of(picture, processor.family)]
    _check_marks(marks.findall(rendered.text), [picture for picture, _ in runs], form, num_files=len(pictures))
    if most is not None:
        check_length(rendered.text, processor, most)
    # Between special tokens, as pictures of these templates stand, the two are the same.
    apart = form.image_join == "official" and form.template != "chat"
    pieces = official_pieces if apart or writes else hf_pieces
    left = iter(runs)
    begin = [] if processor.bos_id is None or form.template == "chat" else [processor.bos_id]  # that writes its own
    ids, loss_mask, modality = begin, [False] * len(begin), [TEXT] * len(begin)
    # Spans follow each other: the last one that begins before a token is the only one that it can lie in.
    first, last = [a for a, _ in rendered.spans], [b for _, b in rendered.spans]
    for token, start, end in pieces(rendered.text, processor, marks):
        if token is None:
            picture, run = next(left)
            ids += [_placeholder(picture, processor)] * run
            loss_mask += [False] * run
            modality += [picture.modality] * run
        else:
            ids.append(token)
            span = bisect_right(first, start) - 1
            loss_mask.append(span >= 0 and end <= last[span])
            modality.append(TEXT)
    return Encoded(ids, loss_mask, modality, rendered.text)


def _learned(
    turns: list[dict[str, Any]], spans: Sequence[tuple[int, int]], open_ended: bool
) -> tuple[tuple[int, int], ...]:
    """The spans of answers that have not weight 0. An opening answer, which templates drop, has no span."""
    turns = turns[:-1] if open_ended and turns and turns[-1].get("from") == "gpt" else turns
    weights = [turn.get("weight") for turn in turns if turn.get("from") == "gpt"]
    return tuple(span for span, weight in zip(spans, weights[len(weights) - len(spans) :], strict=True) if weight != 0)


def check_template(form: PromptFormat, processor: Processor) -> None:
    """Raises `UserError` where a template is not of the target's files, for every record alike.

    Without the template's end token in the vocabulary, that token would be split into letters and no answer would end.
    """
    if form.template == "chat":
        if not processor.tokenizer.chat_template:
            hint = "add the chat_template.jinja that the server uses, or another format.template (v1, qwen_vl, ...)"
            raise UserError("template chat, and the target's files have no chat template", hint=hint)
        return
    end, eos = _TURN_END.get(form.template), processor.tokenizer.eos_token
    if end is not None and eos != end:
        raise UserError(
            f"template {form.template} ends turns with {end}, the tokenizer with {eos}",
            hint="use template: v1 with Llama's tokenizer, qwen, qwen_vl or internvl with Qwen's, gemma with Gemma's",
        )
    wanted = next((name for name, families in _WRITES.items() if processor.family in families), None)
    if wanted != (form.template if form.template in _WRITES else None):
        hint = f"use template: {wanted}" if wanted else "use template: v1, qwen or llama3, as its tokenizer is"
        raise UserError(
            f"template {form.template} and a processor of {processor.family}",
            hint=f"{hint}: {', '.join(_WRITES)} write the tokens between which pictures of their families stand",
        )
    if form.template == "mistral" and form.system and "[SYSTEM_PROMPT]" not in processor.tokenizer.get_vocab():
        raise UserError("format.system is set, and the tokenizer has no [SYSTEM_PROMPT] token (Pixtral 12B's)",
                        hint="leave system out, and begin the question with the sentence")  # fmt: skip


def _check_marks(marks: list[str], pictures: Sequence[Picture], form: PromptFormat, *, num_files: int) -> None:
    """Args:
    pictures: of each run, in order.
    num_files: images and clips, some of which may have several runs.
    """
    if len(marks) != len(pictures):
        clips = any(picture.modality == VIDEO for picture in pictures)
        hint = "write one <image> mark for each image" + (" and one <video> mark for each clip" if clips else "")
        if form.image_rule == "llava15" and len(pictures) > 1:
            hint += ", and set image_rule: next in the stage's format (llava15 keeps one mark of a turn)"
        named = "images and clips" if clips else "images"
        count = max(0, num_files + len(marks) - len(pictures))
        raise UserError(f"{count} <image> marks for {num_files} {named}", hint=hint)
    for mark, picture in zip(marks, pictures, strict=True):
        if mark == VIDEO_MARK and picture.modality != VIDEO:
            raise UserError("a <video> mark stands for an image", hint="write <image>, or name a clip under `video`")


def _placeholder(picture: Picture, processor: Processor) -> int:
    if picture.modality == VIDEO and processor.video_token_id is not None:
        return processor.video_token_id
    return processor.image_token_id
