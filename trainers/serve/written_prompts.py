"""Prompts that a target writes itself: the user's turn of its own template is begun, and the target goes on with it.

A model that was trained on conversations has seen users' turns as well, so it can write them (Magpie, arXiv 2406.08464,
section 2). What it writes depends on the seed, the split and a prompt's number alone.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core import ranks
from ...core.batch import Request
from ...core.errors import UserError
from ...core.files import write_whole
from ...core.json_types import JsonObject
from ...data.conversations import PromptFormat, encode, end_ids
from ...data.dataset import ConversationData
from ...data.families.processor import Processor
from ...data.pictures.tiles import Aspect
from ...models.decoding.batched import Written, write_answers
from ...models.decoding.warp import Warp
from ...models.targets.language import LanguageTarget
from ..run.context import Context
from ..run.stage_records import check_fit, open_records

_ANYTHING = "Q", "7"  # two turns that differ from their first token on


@dataclass(frozen=True)
class Begun:
    """How a user's turn begins, and what is known of it.

    Args:
        begin: its first words, without a blank behind them; empty: the target begins.
        picture: a path in the split's folder; None: there is none.
    """

    begin: str
    topic: str | None
    picture: str | None

    def record(self, name: str, text: str) -> JsonObject:
        """A record of a user's turn `text`, without an answer."""
        known = {"id": name, "topic": self.topic, "image": self.picture}
        turns = [{"from": "human", "value": text if self.picture is None else f"<image>\n{text}"}]
        return {key: value for key, value in known.items() if value} | {"conversations": turns}


class Prompts:
    """Writes the prompts of one split.

    Args:
        split: its name.
        begun: of each prompt that is tried, in order.
        pictures: the folder of their pictures; None: there are none.
        aspect: how they are read.
    """

    def __init__(
        self,
        split: str,
        begun: Sequence[Begun],
        context: Context,
        target: LanguageTarget,
        *,
        form: PromptFormat,
        warp: Warp,
        max_new_tokens: int,
        batch_size: int,
        pictures: str | None,
        aspect: Aspect,
    ):
        self.split, self.begun, self.context, self.target, self.warp = split, begun, context, target, warp
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.processor = context.processor()
        self.ends = end_ids(self.processor, form)
        self.special = special_ids(self.processor)
        self.behind = {one.begin: _behind(one.begin, form, self.processor) for one in begun}
        # The dataset reads pictures and renders as it does for everyone, so the turns are written as records.
        file = context.folder / "cache" / f"begun-{split}.json"
        file.parent.mkdir(exist_ok=True)
        if ranks.is_main():
            write_whole(file, json.dumps([one.record("", _turn(one.begin, _ANYTHING[0])) for one in begun]).encode())
        ranks.barrier()
        self.most = target.decoder.max_positions or 1 << 24
        data = ConversationData(path=str(file), images=pictures, aspect=aspect, max_length=self.most)
        self.dataset = open_records(data, form, context, self.processor, files=[file], learned=False)
        check_fit(context, self.dataset, target.decoder, as_cut=False, section="")

    def texts(self, numbers: range) -> list[str | None]:
        """The user's turn of each of these tries; None: it did not end, or says nothing."""
        parts = [range(start, min(start + self.batch_size, numbers.stop)) for start in numbers[:: self.batch_size]]
        texts: list[str | None] = []
        for part in self.context.stop.watch(parts, "inside a shard of prompts"):
            requests = [self._request(number) for number in part]
            written = write_answers(
                self.target.decoder, requests, self.warp,
                limits=[min(self.max_new_tokens, self.most - len(request.ids)) for request in requests],
                seeds=[zlib.crc32(f"{self.context.seed}/{self.split}/{number}".encode()) for number in part],
                eos_ids=self.ends, prefill_chunk=self.target.prefill_chunk,
            )  # fmt: skip
            texts += map(self._text, part, written)
            self.context.progress.advance(len(part))
        return texts

    def _request(self, number: int) -> Request:
        """The prompt up to where the user's turn goes on."""
        request = self.target.view(self.dataset.request(number)[0])
        kept = len(request.ids) - self.behind[self.begun[number].begin][0]
        return replace(request, ids=request.ids[:kept], modality=request.modality[:kept])

    def _text(self, number: int, written: Written) -> str | None:
        begin = self.begun[number].begin
        ids = [token for token in written.ids if token not in self.ends]
        text = str(self.processor.tokenizer.decode(ids))
        ended, behind = written.stop == "eos", self.behind[begin][1]
        if not ended and behind in text:
            # A template whose turns have no end token: this one ends where the answer would begin.
            text, ended = text.partition(behind)[0], True
        elif any(token in self.special for token in ids):
            return None
        return f"{begin} {text.strip()}".strip() if ended and text.strip() else None


def special_ids(processor: Processor) -> set[int]:
    """Ids that stand for no text: a turn with one of them is not what a user writes."""
    added = processor.tokenizer.added_tokens_decoder
    return {*processor.tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}


def _turn(begin: str, text: str) -> str:
    return f"{begin} {text}".strip()


def _behind(begin: str, form: PromptFormat, processor: Processor) -> tuple[int, str]:
    """How many ids follow the begin of a user's turn, and the text behind the turn, where `_ANYTHING` goes on with it.

    Raises:
        UserError: the template has no user's turn that can be gone on with.
    """
    turns = ([{"from": "human", "value": _turn(begin, text)}] for text in _ANYTHING)
    one, other = (encode(turn, form, processor, open_ended=True) for turn in turns)
    same = _num_same(one.ids, other.ids)
    behind = one.text[len(one.text) - _num_same(one.text[::-1], other.text[::-1]) :].strip()
    cut = str(processor.tokenizer.decode(one.ids[same:])).strip()
    if not behind or not cut.startswith(_ANYTHING[0]):
        raise UserError(f"template {form.template} writes no user's turn that a target can go on with",
                        hint="name a template with turns: format: {template: chat}, v1, qwen, ...")  # fmt: skip
    return len(one.ids) - same, behind


def _num_same(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
