"""Conversations as the target's own chat template writes them: system messages, tools, tool calls, reasoning, pictures.

A server shows its model nothing else, so records of a log become the ids that the server read. Answers are found by
rendering the messages up to each of them, never by knowledge of a template.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..core.errors import UserError, encodable, first_line
from ..core.json_types import Json, JsonMapping, JsonObject
from ..core.pictures import MARKS, VIDEO_MARK
from .families.prompt_templates import SYSTEM_ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in (*SYSTEM_ROLES, "tool")}
_PROBE, _ANSWER = "a question", "an answer"

Spans = tuple[tuple[int, int], ...]


def render_chat(
    turns: Sequence[JsonMapping],
    tokenizer: PreTrainedTokenizerFast,
    record: JsonMapping,
    *,
    shown: re.Pattern[str] | None,
    written: Sequence[str],
    open_ended: bool,
    template: str | None = None,
) -> tuple[str, Spans]:
    """Text of a conversation, its pictures as marks (`written`), and the character spans that are supervised.

    The last answer is supervised up to its end token; where the template writes none, the tokenizer's is added. So is
    each earlier answer that the prompt still shows as the target wrote it; one that the template shortens afterwards
    (thoughts that are dropped), or that has weight 0, is read and not learned from. Raises `UserError`: the template
    refuses the messages, leaves out what the answer says, or begins the answer otherwise than it asks for it.

    Args:
        record: whose `tools` and `chat_template_kwargs` the template gets.
        shown: what the template writes for a picture; None: its mark.
        written: of each image and clip, in order, what a processor puts in its place.
        open_ended: leave out the last answer, and end where it begins.
        template: in place of the tokenizer's own.
    """
    chat = _Chat(tokenizer, record, template)
    messages = chat.messages(turns, written)
    pictures = shown or _marks(written)
    ends_with_answer = bool(turns) and turns[-1].get("from") == "gpt"
    if open_ended or not ends_with_answer:
        prompt = chat.text(messages[:-1] if ends_with_answer else messages, asks=True)
        return _marked(prompt, (), pictures, written)
    whole, spans = chat.text(messages, asks=False), []
    last = len(turns) - 1
    for place, turn in enumerate(turns):
        if turn["from"] != "gpt" or turn.get("weight") == 0:
            continue
        start, answered = chat.answer(messages[: place + 1], whole if place == last else None)
        text = answered.rstrip()
        stop, is_ended = max(len(text), start), text[max(start, 0) :].endswith(_special(tokenizer))
        lost = _unsaid(turn, answered[start:stop])
        if place == last:
            if start < 0 or lost:
                problem = "writes the answer otherwise than its prompt begins it"
                problem = problem if start < 0 else f"leaves out the answer's {lost}"
                hint = "leave such records out (on_error: skip), or name a template of this project: format.template"
                raise UserError(f"the target's chat template {problem}", hint=hint)
            if not is_ended:
                whole = answered[:stop] + str(tokenizer.eos_token)
                stop = len(whole)
            spans.append((start, stop))
        elif start >= 0 and whole.startswith(answered[:stop]) and not lost:
            spans.append((start, stop))
    return _marked(whole, tuple(spans), pictures, written)


class _Chat:
    """A tokenizer's template, or another one in its place, with what a record hands to it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, record: JsonMapping, template: str | None):
        self._apply = functools.partial(tokenizer.apply_chat_template, chat_template=template)
        self._tools = record.get("tools") or None
        self._options = dict(record.get("chat_template_kwargs") or {})
        if taken := sorted(self._options.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()):
            raise UserError(f"chat_template_kwargs has {taken[0]}, which is no variable of a template",
                            hint="take it out of the record")  # fmt: skip
        self._takes_texts, self._takes_parts = self._shows(_PROBE), self._shows([{"type": "text", "text": _PROBE}])

    def messages(self, turns: Sequence[JsonMapping], written: Sequence[str]) -> list[JsonObject]:
        """The request's messages, with a part for each mark if there are pictures."""
        left, marks = iter(written), _marks(written) if written else None
        return [self._message(turn, left, marks) for turn in turns]

    def _message(self, turn: JsonMapping, left: Iterator[str], marks: re.Pattern[str] | None) -> JsonObject:
        role = _ROLES.get(str(turn.get("from")))
        if role is None:
            raise UserError(f"unknown role {turn.get('from')!r}", hint=f"roles are {', '.join(_ROLES)}")
        value = str(turn["value"])
        # The line break beside a mark is LLaVA's way of writing.
        pieces = re.split(f"\n?({marks.pattern})\n?", value) if marks else [value]
        parts: list[JsonObject] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                parts.append({"type": "video" if VIDEO_MARK in next(left, "") else "image"})
            elif piece:
                parts.append({"type": "text", "text": piece})
        shows = any(part["type"] != "text" for part in parts)
        if shows and not self._takes_parts:
            raise UserError("the target's chat template writes no pictures", hint="name a template: format.template")
        content = parts if shows or not self._takes_texts else value
        message = {"role": role, "content": content}
        message |= {key: turn[key] for key in ("tool_calls", "tool_call_id", "name") if key in turn}
        # Templates of the two names read the same: Qwen's the first, vLLM's requests have the second.
        return message | ({"reasoning_content": turn["reasoning"], "reasoning": turn["reasoning"]}
                          if "reasoning" in turn else {})  # fmt: skip

    def text(self, messages: Sequence[JsonMapping], *, asks: bool) -> str:
        """The text of messages; with `asks` an answer's beginning follows."""
        try:
            text: str = self._apply(  # type: ignore[assignment]
                list(messages),  # type: ignore[arg-type]
                tools=self._tools,
                add_generation_prompt=asks,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # a template is a program, and raises what it likes
            raise UserError(f"the target's chat template refuses the record: {first_line(error)}",
                            hint="leave such records out: on_error: skip") from error  # fmt: skip
        if encodable(text) != text:
            raise UserError("the record has half a character (a lone surrogate)", hint="fix or remove it")
        return text

    def answer(self, messages: Sequence[JsonMapping], whole: str | None) -> tuple[int, str]:
        """The begin of the last answer in the text of all (`whole`), and that text; -1: not behind its prompt."""
        prompt = self.text(messages[:-1], asks=True)
        answered = self.text(messages, asks=False) if whole is None else whole
        return (len(prompt) if answered.startswith(prompt) else -1), answered

    def _shows(self, content: Json) -> bool:
        """Whether the template writes a message of this form as a message."""
        try:
            text = self._apply([{"role": "user", "content": content}], tokenize=False)
        except Exception:  # as of `text`
            return False
        return _PROBE in text and "'type'" not in text


@functools.lru_cache(maxsize=8)
def end_of_answers(tokenizer: PreTrainedTokenizerFast, template: str | None = None) -> str | None:
    """The special token that a chat template, `template` or the tokenizer's, writes behind an answer; None: none."""
    try:
        chat = _Chat(tokenizer, {}, template)
        turns = [{"from": "human", "value": _PROBE}, {"from": "gpt", "value": _ANSWER}]
        behind = chat.text(chat.messages(turns, ()), asks=False).rpartition(_ANSWER)[2].lstrip()
    except UserError:
        return None
    return max((token for token in _special(tokenizer) if behind.startswith(token)), key=len, default=None)


@functools.lru_cache(maxsize=8)
def _special(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Tokens that end turns are among them."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple({*added, *tokenizer.all_special_tokens})


def _unsaid(turn: JsonMapping, answer: str) -> str | None:
    """The part of a turn that the text of its answer lacks; blanks do not count."""
    text = "".join(answer.split())
    calls = [call["function"]["name"] for call in turn.get("tool_calls") or ()]
    parts = {"text": str(turn["value"]), "reasoning": str(turn.get("reasoning") or "")}
    lost = [name for name, part in parts.items() if "".join(part.split()) not in text]
    lost += ["tool calls"] if not all("".join(name.split()) in text for name in calls) else []
    return lost[0] if lost else None


def _marks(written: Sequence[str]) -> re.Pattern[str]:
    return MARKS[any(VIDEO_MARK in mark for mark in written)]


def _marked(text: str, spans: Spans, pictures: re.Pattern[str], written: Sequence[str]) -> tuple[str, Spans]:
    """The text with each picture as its marks, and the spans in it."""
    if not written:
        return text, spans
    matches = list(pictures.finditer(text))
    if len(matches) != len(written):
        raise UserError(f"the target's chat template writes {len(matches)} pictures, and the record has {len(written)}",
                        hint="write one <image> mark for each image, and name the token in no text")  # fmt: skip
    marked, place, moves = "", 0, []  # (place in the text, how much longer it is up to there)
    for match, mark in zip(matches, written, strict=True):
        marked += text[place : match.start()] + mark
        place = match.end()
        moves.append((place, len(marked) - place))

    def moved(at: int) -> int:
        return at + next((by for end, by in reversed(moves) if end <= at), 0)

    return marked + text[place:], tuple((moved(a), moved(b)) for a, b in spans)
