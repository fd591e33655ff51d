"""Templates that turn a conversation into text; a family's own ones stand in its file.

Supervision is a matter of character spans: each template says which of its characters are an answer's.
"""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = {"human": "USER", "gpt": "ASSISTANT"}
# Vicuna's.
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
SYSTEM_ROLES = ("system", "developer")
Pairs = list[tuple[str, str]]  # role (human or gpt) and text of each turn


_JINJA = string.Template("""\
{%- set around = $around -%}{{- $begin -}}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}{{- $first -}}{%- endif -%}
{{- around[message['role']][0] -}}
{%- if message['content'] is string -%}{{- message['content']$trim -}}
{%- else -%}
{%- for part in message['content'] -%}{{- part['text'] if part['type'] == 'text' else $picture -}}{%- endfor -%}
{%- endif -%}
{{- around[message['role']][1] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- $asks -}}{%- endif -%}
""")


@dataclass(frozen=True)
class Rendered:
    """A prompt and the character spans in it that are supervised."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Template:
    """A template whose turns begin with a head of their role (ChatML, Llama 3)."""

    name: str  # as recipes have it; of ChatML, the table of the families says how they call it
    head: str = ""  # what begins a turn, with {} for its role
    end: str = ""  # the token that ends a turn; empty: none does
    between: str = ""  # what stands after a turn's end
    system: str = ""  # the template's own system sentence
    answers: str = "assistant"  # what it calls who answers
    surrounds: bool = False  # pictures stand between tokens of their family, which it writes
    keeps_breaks: bool = False  # beside a picture; elsewhere the line break is LLaVA's way of writing a mark
    strips: bool = False  # blanks around a turn's text

    def check_system(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises `UserError` where the tokenizer lacks what surrounds a system sentence."""

    def around(self, role: str) -> tuple[str, str]:
        """What stands before and behind the text of a message: system, user or assistant."""
        return self.head.format(self.answers if role == "assistant" else role), self.end + self.between

    def jinja(self, system: str, picture: str, begin: str) -> str:
        """A chat template for servers that writes what `render` does, with `picture` for each, behind `begin`."""
        around = {role: self.around(role) for role in ("system", "user", "assistant")}
        asks = around["assistant"][0].rstrip(" ")
        first, trim = system.join(around["system"]) if system else "", " | trim" * self.strips
        values = {"around": around, "first": first, "asks": asks, "picture": picture, "begin": begin}
        return _JINJA.substitute({name: json.dumps(value) for name, value in values.items()}, trim=trim)

    def render(self, pairs: Pairs, system: str, open_ended: bool, marks: re.Pattern[str]) -> Rendered:
        """Supervises each answer and the token that ends it; Qwen's official masker also takes a turn's outer tokens.
        No system sentence: ""; `open_ended` leaves out the last answer and ends where it would begin.
        """
        text = self.head.format("system") + system + self.end + self.between if system else ""
        spans, last = [], len(pairs) - 1
        for number, (role, value) in enumerate(pairs):
            text += self.head.format("user" if role == "human" else self.answers)
            if open_ended and number == last and role == "gpt":
                break
            start = len(text)
            text += f"{value}{self.end}"
            if role == "gpt" and value:
                spans.append((start, len(text)))
            text += self.between
        if open_ended and pairs[last][0] == "human":
            text += self.head.format(self.answers)
        return Rendered(text, tuple(spans))


CHATML = Template("chatml", "<|im_start|>{}\n", "<|im_end|>", "\n", "You are a helpful assistant.")
LLAMA3 = Template("llama3", "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", strips=True)
