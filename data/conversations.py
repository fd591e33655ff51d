"""Conversations to ids: one function for training and for decoding, so that both see the same prompt.

Templates are those of the families (`families/`) and the target's own (`chat`, chat_template.py). Supervision is a
matter of character spans, mapped to tokens through offsets, never of counting tokens as the official masker does (it
drops every multi-turn sample of a tokenizer in which a blank and `USER` are one piece).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ..core.errors import UserError, first_line
from ..core.json_types import Json, JsonMapping, JsonObject, value_at
from ..core.pictures import IMAGE_MARK, MARKS, TEXT, VIDEO, VIDEO_MARK, Picture, place_marks, write_marks
from ..core.section import Section
from .chat_template import end_of_answers, render_chat
from .families.processor import Processor
from .families.prompt_templates import ROLES, SYSTEM_ROLES, Rendered
from .families.table import ONE_MARK, TEMPLATES, ImageRule, TemplateName


class PromptFormat(Section):
    """The format of prompts. Training and decoding must use the same one."""

    # plain: alignment; v1: targets with Llama's tokenizer; qwen: LLaVA-OneVision with Qwen2's (its qwen_1_5); qwen_vl:
    # Qwen2-VL, Qwen2.5-VL and Qwen3-VL; internvl: InternVL 3; mistral: Mistral 3 and Pixtral; gemma: Gemma 4,
    # without its channel of thoughts; llama3: text-only targets of Llama-3; chat: the chat template in the target's own
    # files, as servers use it, with each record's system message, tools, tool calls and reasoning (for logs), and what
    # a causal_lm has where nothing is named.
    template: TemplateName = "v1"
    # Of template chat: a file with the chat template that the server is started with (--chat-template), in place of the
    # one in the target's files. The recipe keeps its text.
    chat_template: str | None = Field(None, exclude_if=lambda value: value is None)
    # null: the template's own system sentence (official LLaVA; Qwen2-VL's and Qwen2.5-VL's; the others have none:
    # Mistral's published one names a date; chat: what the target's template writes); "": none. A record's own system
    # message takes its place.
    system: str | None = None
    # llava15 moves every mark of a turn to its front and keeps one; next moves a single mark only, and is
    # the one for several images; verbatim leaves the text alone. Template chat has verbatim, the served order.
    image_rule: ImageRule = ONE_MARK
    # official: the texts around an image are tokenized on their own, so a lone blank stands on both sides;
    # hf: one pass with <image> as a special token, as llava-hf's processor does.
    image_join: Literal["official", "hf"] = "official"
    # In requests, the text after an answer that another turn follows: end, the end token as in training; blank, as in
    # the second turns of TABED's released code.
    answer_end: Literal["end", "blank"] = "end"

    @model_validator(mode="before")
    @classmethod
    def _served(cls, values: Json) -> Json:
        """The order of a message's pictures and texts is a part of what was served."""
        return {"image_rule": "verbatim"} | values if value_at(values, "template") == "chat" else values

    @field_validator("chat_template")
    @classmethod
    def _text_of(cls, value: str | None) -> str | None:
        if value is None or "{" in value:  # the text of one already
            return value
        try:
            return Path(value).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{value} cannot be read: {first_line(error)}") from error

    @model_validator(mode="after")
    def _honoured(self) -> PromptFormat:
        if self.chat_template is not None and self.template != "chat":
            raise ValueError(f"chat_template is of template chat, found {self.template}")
        if self.template == "chat" and (self.system is not None or self.image_rule != "verbatim"):
            key, value = ("image_rule", self.image_rule) if self.system is None else ("system", self.system)
            raise ValueError(f"template chat writes what the server wrote: leave {key} out, found {value}")
        if self.answer_end == "blank" and self.template != "v1":
            raise ValueError(f"answer_end: blank is of template v1, found {self.template}")
        return self


@dataclass(frozen=True)
class Encoded:
    """A tokenized conversation: T ids with their loss mask and modality, and the text that they came from."""

    ids: list[int]
    loss_mask: list[bool]
    modality: list[int]
    text: str


def render(
    turns: list[JsonObject],
    form: PromptFormat,
    *,
    has_image: bool,
    has_clip: bool = False,
    open_ended: bool = False,
    written: Sequence[str] = (),
    family_system: str | None = None,
) -> Rendered:
    """Text of a conversation and what of it is supervised. Raises `UserError`: unknown role, roles that do not
    alternate, or a sample that `plain` cannot render.

    Args:
        turns: `from`/`value` pairs as in LLaVA JSON; a first turn that is not the human's is dropped.
        has_image: there are images or clips, whose marks are placed.
        has_clip: <video> is a mark, too.
        written: of a template that surrounds pictures, what each mark is written as.
        family_system: the family's system sentence; None: the template's.
        open_ended: leave out the last answer, ending where it would begin (for decoding).
    """
    system = form.system
    if turns and turns[0].get("from") in SYSTEM_ROLES:
        if form.template == "plain":
            raise _needs_chat("a system message", form)
        system, turns = str(turns[0]["value"]), turns[1:]
    pairs = [(_role(turn, form), str(turn["value"])) for turn in turns]
    if form.template != "plain" and pairs and pairs[0][0] != "human":
        pairs = pairs[1:]
    for number, (role, _) in enumerate(pairs):
        if role != ("human", "gpt")[number % 2]:
            raise UserError(f"turn {number} is {role}'s; the roles human and gpt must alternate")
    if has_image:
        pairs = [(role, place_marks(text, form.image_rule, has_clip=has_clip)) for role, text in pairs]
    template, marks = TEMPLATES[form.template], MARKS[has_clip]
    if template.surrounds:
        pairs = write_marks(pairs, written, marks, keeps_breaks=template.keeps_breaks)
    if template.strips:
        pairs = [(role, value.strip()) for role, value in pairs]
    if open_ended and form.answer_end == "blank":
        template = replace(template, end=" ")
    usual = template.system if family_system is None else family_system
    return template.render(pairs, usual if system is None else system, open_ended, marks)


def _role(turn: JsonObject, form: PromptFormat) -> str:
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


def encode(
    turns: list[JsonObject],
    form: PromptFormat,
    processor: Processor,
    *,
    pictures: Sequence[Picture] = (),
    open_ended: bool = False,
    record: JsonMapping | None = None,
    most: int | None = None,
) -> Encoded:
    """Ids, supervision and modality of a conversation; marks are expanded to runs of the image or video token.

    A token is supervised when its characters lie in an answer's span (everything after the colon of `ASSISTANT:` up to
    and including `</s>`). A prompt for decoding is encoded whole, too: the blank before an answer belongs to its first
    token and is left to the decoder. Raises `TooLong`: its beginning alone has more than twice `most` ids. Raises
    `UserError`: as `render` and `render_chat`; also when the marks do not match the pictures, or the template the
    tokenizer.

    Args:
        pictures: of the images and clips, in the order of their marks.
        record: that the turns are of: template chat reads its `tools` and `chat_template_kwargs`.
        most: ids; text that has far more is not tokenized whole. None: it is, however long.
    """
    check_template(form, processor)
    has_clip = any(picture.modality == VIDEO for picture in pictures)
    family, record = processor.picture_family, record or {}
    if form.template == "chat":
        text, spans = render_chat(
            turns, processor.tokenizer, record, shown=family.written, written=family.marks(pictures),
            open_ended=open_ended, template=form.chat_template,
        )  # fmt: skip
        rendered = Rendered(text, spans)
    else:
        if record.get("tools") or record.get("chat_template_kwargs"):
            raise _needs_chat("tools" if record.get("tools") else "chat_template_kwargs", form)
        rendered = render(
            turns, form, has_image=len(pictures) > 0, has_clip=has_clip, open_ended=open_ended,
            written=family.marks(pictures), family_system=family.system,
        )  # fmt: skip
        rendered = Rendered(rendered.text, _learned(turns, rendered.spans, open_ended))
    marks = MARKS[has_clip]
    runs = [(picture, length) for picture in pictures for length in family.runs(picture)]
    _check_marks(marks.findall(rendered.text), [picture for picture, _ in runs], form, num_files=len(pictures))
    if most is not None:
        check_length(rendered.text, processor, most)
    apart = form.image_join == "official" and form.template != "chat"
    # A tokenizer whose pictures are written otherwise need not know the mark; they stand between special tokens.
    apart |= family.written is not None and not family.written.fullmatch(IMAGE_MARK)
    pieces = official_pieces if apart else hf_pieces
    left = iter(runs)
    begin = [] if processor.bos_id is None or form.template == "chat" else [processor.bos_id]  # that writes its own
    ids, loss_mask, modality = begin, [False] * len(begin), [TEXT] * len(begin)
    # Spans follow each other: the last one that begins before a token is the only one that it can lie in.
    first, last = [a for a, _ in rendered.spans], [b for _, b in rendered.spans]
    found = pieces(rendered.text, processor, marks)
    # Where the last answer begins, if it is learned: of earlier ones a server tokenizes the text, too.
    learned = turns and turns[-1].get("from") == "gpt" and turns[-1].get("weight") != 0 and not open_ended
    cut = first[-1] if learned and first else 0
    if any(start < cut < end for _, start, end in found):  # a server has tokenized the prompt alone
        behind = pieces(rendered.text[cut:], processor, marks)
        found = [*pieces(rendered.text[:cut], processor, marks), *((t, cut + a, cut + b) for t, a, b in behind)]
    for token, start, end in found:
        if token is None:
            picture, run = next(left)
            video = processor.video_token_id if picture.modality == VIDEO else None
            ids += [processor.image_token_id if video is None else video] * run
            loss_mask += [False] * run
            modality += [picture.modality] * run
        else:
            ids.append(token)
            span = bisect_right(first, start) - 1
            loss_mask.append(span >= 0 and end <= last[span])
            modality.append(TEXT)
    return Encoded(ids, loss_mask, modality, rendered.text)


def _learned(
    turns: list[JsonObject], spans: Sequence[tuple[int, int]], open_ended: bool
) -> tuple[tuple[int, int], ...]:
    """The spans of answers that have not weight 0. An opening answer, which templates drop, has no span."""
    turns = turns[:-1] if open_ended and turns and turns[-1].get("from") == "gpt" else turns
    weights = [turn.get("weight") for turn in turns if turn.get("from") == "gpt"]
    return tuple(span for span, weight in zip(spans, weights[len(weights) - len(spans) :], strict=True) if weight != 0)


def check_template(form: PromptFormat, processor: Processor) -> None:
    """Raises `UserError` where a template is not of the target's files, for every record alike. Without the template's
    end token in the vocabulary, that token would be split into letters and no answer would end.
    """
    if form.template == "chat":
        if not (form.chat_template or processor.tokenizer.chat_template):
            hint = "name the file that the server uses (format.chat_template), or another format.template (v1, ...)"
            raise UserError("template chat, and the target's files have no chat template", hint=hint)
        return
    template, eos = TEMPLATES[form.template], processor.tokenizer.eos_token
    if template.end and eos != template.end:
        raise UserError(
            f"template {form.template} ends turns with {template.end}, the tokenizer with {eos}",
            hint="use template: chat, the target's own, or v1 with Llama's tokenizer, qwen (ChatML), qwen_vl or "
            "internvl with Qwen's, gemma with Gemma's",
        )
    wanted = processor.picture_family.template
    if wanted != (template.name if template.surrounds else None):
        hint = f"use template: {wanted}" if wanted else "use template: v1, qwen or llama3, as its tokenizer is"
        surround = ", ".join(other.name for other in TEMPLATES.values() if other.surrounds)
        raise UserError(
            f"template {form.template} and a processor of {processor.family}",
            hint=f"{hint}: {surround} write the tokens between which pictures of their families stand",
        )
    if form.system:
        template.check_system(processor.tokenizer)


def _check_marks(marks: list[str], pictures: Sequence[Picture], form: PromptFormat, *, num_files: int) -> None:
    """`pictures` are of each run, in order; of `num_files` images and clips some may have several runs."""
    if len(marks) != len(pictures):
        clips = any(picture.modality == VIDEO for picture in pictures)
        hint = "write one <image> mark for each image" + (" and one <video> mark for each clip" if clips else "")
        if form.image_rule == ONE_MARK and len(pictures) > 1:
            hint += f", and set image_rule: next in the stage's format ({ONE_MARK} keeps one mark of a turn)"
        named = "images and clips" if clips else "images"
        count = max(0, num_files + len(marks) - len(pictures))
        raise UserError(f"{count} <image> marks for {num_files} {named}", hint=hint)
    for mark, picture in zip(marks, pictures, strict=True):
        if mark == VIDEO_MARK and picture.modality != VIDEO:
            raise UserError("a <video> mark stands for an image", hint="write <image>, or name a clip under `video`")


def end_ids(processor: Processor, form: PromptFormat) -> tuple[int, ...]:
    """Ids that end an answer, in ascending order: those of the target's generation config (Llama 3.1's names three),
    the tokenizer's, and what the prompt format writes behind an answer.
    """
    # The templates of this project end with the tokenizer's own token: `encode` refuses others.
    written = end_of_answers(processor.tokenizer, form.chat_template) if form.template == "chat" else None
    written_ids = () if written is None else (processor.tokenizer.convert_tokens_to_ids(written),)
    return tuple(sorted({*processor.generation_ends, processor.eos_id, *written_ids}))


_CHARACTERS = 16  # of the beginning that is tokenized, for each id that there is room for; an id has about four


class TooLong(UserError):
    """A sample of more ids than there is room for: `at_least` in its beginning, where no more was tokenized."""

    def __init__(self, problem: str, *, hint: str | None = None, at_least: int | None = None):
        super().__init__(problem, hint=hint)
        self.at_least = at_least


def check_length(text: str, processor: Processor, most: int) -> None:
    """Raises `TooLong` where a beginning of the text has more than twice `most` ids. Twice, since what follows may join
    a beginning's last ids. Text of very long words is tokenized in growing parts.
    """
    size = _CHARACTERS * most
    while size < len(text):
        count = len(processor.tokenizer(text[:size], add_special_tokens=False).input_ids)
        if count > 2 * most:
            raise TooLong(f"at least {count} ids (in the first {size:,} of {len(text):,} characters), more than "
                          f"max_length {most}", at_least=count)  # fmt: skip
        size *= 4


Piece = tuple[int | None, int, int]  # id (None for a picture), first and past-last character


def official_pieces(text: str, processor: Processor, marks: re.Pattern[str]) -> list[Piece]:
    """Each chunk between images is tokenized as if it began a text (so it gets the tokenizer's leading blank)."""
    pieces: list[Piece] = []
    start = 0
    for mark in marks.finditer(text):
        pieces += [*_tokenize(text[start : mark.start()], start, processor), (None, mark.start(), mark.end())]
        start = mark.end()
    return pieces + _tokenize(text[start:], start, processor)


def hf_pieces(text: str, processor: Processor, marks: re.Pattern[str]) -> list[Piece]:
    """The text in one pass, with the image token where a mark stands."""
    # A tokenizer need not know <video>, and <image> is as long.
    text = marks.sub(IMAGE_MARK, text)
    return [(None if t == processor.image_token_id else t, a, b) for t, a, b in _tokenize(text, 0, processor)]


def _tokenize(chunk: str, start: int, processor: Processor) -> list[Piece]:
    encoded = processor.tokenizer(chunk, return_offsets_mapping=True, add_special_tokens=False)
    return [(i, start + a, start + b) for i, (a, b) in zip(encoded.input_ids, encoded.offset_mapping, strict=True)]
