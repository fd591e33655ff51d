"""The measuring loop: decodes each request plainly and by every method, and saves each result at once.

Methods are interleaved request by request, and so are the lengths at which a clip is decoded: a slow minute hits all
alike. A killed run resumes after the saved results, with any number of ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core import ranks
from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...data.dataset import ConversationDataset
from ...data.lengths import count_long
from ...eval.first_difference import first_difference
from ...eval.loop import Clock, Decoding, EmbeddedRequest, Generation, embed_once, generate
from ...eval.measured_rows import PLAIN, Row, measure
from ...eval.policies import Chain, Draw
from ...eval.rules import RULES
from ...models.decoding.warp import Warp
from ...models.targets.base import Target
from ..run.context import Context
from ..train.preflight import MORE_POSITIONS
from .drafters import Drafting
from .evaluate_settings import EvaluateSettings
from .requests import ConversationSet, Opened, RequestSet
from .resume_log import resumed_in_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Measured:
    """One set at one temperature and length."""

    rows: list[Row]  # of every request plain decoding's, and one for each method and drafter
    plain: list[Row | None]  # plain decoding's of each request, in their order; None where the request is left out


@dataclass(frozen=True)
class Measuring:
    """Everything that requests are decoded with."""

    stage: EvaluateSettings
    context: Context
    target: Any
    drafting: Sequence[Drafting]  # each method's drafters, in the order in which they decode
    eos_ids: tuple[int, ...]  # tokens that end an answer; none of an image
    tokenizer: PreTrainedTokenizerFast | None = None  # None where tokens are an image's codes
    left_out: dict[str, str] = field(default_factory=dict)  # set -> how many of how many requests cannot be read
    _warm: Counter[Any] = field(default_factory=Counter)

    def all(self, sets: Sequence[RequestSet]) -> list[Row]:
        """Rows of all ranks, at every temperature and length of answers.

        Args:
            sets: one set at each length of its clips, which are measured in turn; or a single one.
        """
        for requests in sets:
            self.check_positions(requests)
        measured = [self.at(sets, t, length) for t in self.stage.temperatures for length in self.lengths]
        for requests, last in zip(sets, measured[-1], strict=True):
            self.tell(requests, last)
        return [row for one_set in zip(*measured, strict=True) for part in one_set for row in part.rows]

    def one(self, requests: RequestSet, temperature: float, max_new_tokens: int) -> Measured:
        """One set at one temperature and length of answers."""
        self.check_positions(requests)
        (measured,) = self.at([requests], temperature, max_new_tokens)
        self.tell(requests, measured)
        return measured

    def announce(self, sets: Sequence[RequestSet], *, others: bool = False) -> None:
        """Tell how many requests all ranks will decode; `others`: and more, which are not known yet."""
        total = 0 if others else sum(map(len, sets)) * len(self.stage.temperatures) * len(self.lengths)
        self.context.progress.count("request", total)

    @property
    def lengths(self) -> list[int]:
        """Tokens of an answer; an image has as many as it has."""
        return self.stage.max_new_tokens if self.tokenizer is not None else [self.target.num_codes]

    def tell(self, requests: RequestSet, measured: Measured) -> None:
        """Log how many requests of a set were decoded, and note those left out for the report."""
        count = sum(row is None for row in measured.plain)
        if count:
            self.left_out[requests.name] = f"{count} of {len(requests)} (skipped.jsonl)"
        listed = f", {count} left out: {self.context.folder / 'skipped.jsonl'}" if count else ""
        self.context.say(f"{requests.name}: {len(requests) - count} requests decoded{listed}")

    def at(self, sets: Sequence[RequestSet], temperature: float, max_new_tokens: int) -> list[Measured]:
        """Each of `sets` at one temperature and length of answers: the first request of each, then the second.

        What was kept before is read, not decoded again.
        """
        stems = [self.stem(requests, temperature, max_new_tokens) for requests in sets]
        decodings = self.decodings(temperature, max_new_tokens)
        so_far: dict[str, tuple[int, int]] = {}  # method -> tokens emitted and cycles, of what this rank has decoded

        def decode(part: int, index: int) -> list[JsonObject] | None:
            requests = sets[part]
            opened = requests.open(index, self.target)
            if opened is None:
                self.context.progress.advance()
                return None
            common = requests.of_row(opened, temperature, max_new_tokens)
            rows = self._rows(index, opened, decodings, common, requests.labels(index))
            for row in rows[1:]:  # the first is plain decoding's
                emitted, cycles = so_far.get(row.method, (0, 0))
                so_far[row.method] = emitted + row.num_emitted, cycles + row.num_cycles
            taus = [(emitted / cycles, name) for name, (emitted, cycles) in so_far.items() if cycles]
            self.context.progress.note(*(f"tau {best:.2f} so far ({name})" for best, name in sorted(taus)[-1:]))
            self.context.progress.advance()
            return [row.to_json() for row in rows]

        def before(part: int, left: Sequence[int]) -> None:
            self.context.progress.skip(len(sets[part]) - len(left))
            self._warm_up(sets[part], left, decodings, temperature)

        resumed = resumed_in_turn(
            stems,
            [len(requests) for requests in sets],
            decode,
            self.context.stop,
            before=before,
            expected=lambda part, index: sets[part].expected(index),
            others=self.context.progress.advance,
        )
        read = [[[Row.from_json(value, where=stem) for value in values or ()] for values in of]
                for of, stem in zip(resumed, stems, strict=True)]  # fmt: skip
        return [Measured([row for rows in of for row in rows], [rows[0] if rows else None for rows in of])
                for of in read]  # fmt: skip

    def stem(self, requests: RequestSet, temperature: float, max_new_tokens: int) -> Path:
        """The beginning of the names of the resume log's files."""
        parts = [requests.turn or requests.part, requests.budget, f"T{temperature:g}", str(max_new_tokens)]
        return self.context.folder / "rows" / requests.benchmark / "-".join(part for part in parts if part)

    def _rows(
        self,
        index: int,
        opened: Opened,
        decodings: Mapping[Drafting, Decoding],
        common: JsonMapping,
        labels: JsonMapping,
    ) -> list[Row]:
        """Plain decoding's row, and one for each method and drafter."""
        plain: list[Generation] = []
        drafted: dict[Drafting, list[Generation]] = {drafting: [] for drafting in decodings}
        logs: dict[Drafting, JsonObject] = {}
        plainly = self.plainly(common["temperature"], common["max_new_tokens"])
        for _ in range(self.stage.repeats):
            # One pass of the tower for all methods of a repeat, whose times it counts in.
            embedded = embed_once(self.target, opened.request, clock=self.clock)
            plain.append(self._generate(index, None, opened, plainly, embedded))
            for drafting, decoding in decodings.items():
                drafted[drafting].append(self._generate(index, drafting, opened, decoding, embedded))
                logs[drafting] = drafting.details(opened, common["max_new_tokens"])
                if decoding.visual_skip is not None:
                    logs[drafting] |= drafted[drafting][0].visual_skips(decoding.visual_skip)
        about = self._about_plain(plain[0].tokens, opened) | dict(labels)
        rows = [measure(plain, plain, method=PLAIN, details=about, **common)]
        for drafting, generations in drafted.items():
            row = measure(
                plain, generations, method=drafting.name, drafter=drafting.drafter_name, mode=drafting.mode,
                details=about | logs[drafting], **common,
            )  # fmt: skip
            if decodings[drafting].rule is RULES["greedy"] and not row.identical:
                # With the gap of the scores where its answer parts from plain decoding's.
                ours = next((g.tokens for g in (*generations, *plain) if g.tokens != plain[0].tokens), None)
                assert ours is not None, "see `measure`"
                difference = first_difference(self.target, opened.request, plain[0].tokens, ours, plainly, embedded)
                row = replace(row, details={**row.details, "difference": asdict(difference)})
            rows.append(row)
        return rows

    def _about_plain(self, tokens: list[int], opened: Opened) -> JsonObject:
        """Whether the target's own answer is the data's, word for word."""
        if opened.answer is None or self.tokenizer is None:
            return {}
        return {"plain_is_data": self.text(tokens).strip() == opened.answer.strip()}

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Tokens as text, with the end token and other special ones where asked for."""
        assert self.tokenizer is not None, "a language model answers in text"
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def _warm_up(
        self, requests: RequestSet, left: Sequence[int], decodings: Mapping[Drafting, Decoding], temperature: float
    ) -> None:
        """The first requests of each medium, length and temperature, before the clock counts."""
        place = requests.medium, requests.budget, temperature
        for index in left[: max(0, self.stage.warmup - self._warm[place])]:
            self.context.stop.check(f"before {requests.name} was measured")
            self._warm[place] += 1
            opened = requests.open(index, self.target)
            if opened is not None:
                embedded = embed_once(self.target, opened.request, clock=self.clock)
                self._generate(index, None, opened, self.plainly(temperature, self.lengths[0]), embedded)
                for drafting, decoding in decodings.items():
                    self._generate(index, drafting, opened, decoding, embedded)

    def _generate(
        self,
        index: int,
        drafting: Drafting | None,
        opened: Opened,
        decoding: Decoding,
        embedded: EmbeddedRequest | None,
    ) -> Generation:
        drafter = None if drafting is None else drafting.drafter
        uniforms = self.uniforms(index)
        return generate(self.target, drafter, opened.request, decoding, uniforms, embedded=embedded, clock=self.clock)

    @property
    def clock(self) -> Clock | None:
        """What counts the seconds; None: the wall's clock."""
        return clock_of(self.stage.clock, self.target)

    def uniforms(self, index: int) -> torch.Generator:
        """The seed depends on the request and not on the rank, so the report does not depend on the number of ranks."""
        return torch.Generator().manual_seed(self.seed(index))

    def seed(self, index: int) -> int:
        """The seed of the draws of request `index`."""
        return self.context.seed * 1_000_003 + index

    def warp(self, temperature: float) -> Warp:
        """The stage's top-k and top-p at this temperature."""
        return Warp(temperature, self.stage.top_k, self.stage.top_p)

    def plainly(self, temperature: float, max_new_tokens: int) -> Decoding:
        """Plain decoding. It proposes nothing: the policy is never asked, and the rule draws the next token."""
        rule = RULES["sampling" if temperature else "greedy"]
        return Decoding(Chain(1), rule, Draw("top-k"), self.warp(temperature), max_new_tokens, self.eos_ids)

    def decodings(self, temperature: float, max_new_tokens: int) -> dict[Drafting, Decoding]:
        """The drafters of the methods that can be used at this temperature."""
        return {
            drafting: Decoding(
                drafting.policy, drafting.rule(temperature), Draw(drafting.method.draw), self.warp(temperature),
                max_new_tokens, self.eos_ids, drafting.method.visual_skip,
            )
            for drafting in self.drafting
            if drafting.method.allowed(temperature)
        }  # fmt: skip

    def check_positions(self, requests: RequestSet) -> None:
        """Warn of requests beyond the positions of the target (it then answers noise) or of a draft that sees them."""
        if not ranks.is_main() or not isinstance(requests, ConversationSet):
            return
        held, longest = self.target.decoder.max_positions, max(self.lengths)
        if held is not None:
            if longest >= held:
                raise UserError(
                    f"max_new_tokens is {longest:,}, and the target has {held:,} positions for a prompt and its answer",
                    key=f"stages.{self.context.name}.max_new_tokens", hint=f"write at most {held - 1:,}",
                )  # fmt: skip
            too_long = count_long(requests.dataset, held - longest, prompts=True)
            if too_long.first is not None:
                self.context.say(
                    f"warning: {requests.name}: prompts that leave less than {longest:,} of the target's {held:,} "
                    f"positions: {too_long}; its answers are noise there"
                )
        seeing = {d.drafter_name: d.drafter.decoder for d in self.drafting if "M" in d.members}
        before_decoding(
            requests.name,
            requests.dataset,
            {name: decoder.max_positions for name, decoder in seeing.items()},
            self.context.say,
            max_new_tokens=longest,
            flat={name for name, decoder in seeing.items() if not decoder.reads_newlines},
        )


def before_decoding(
    name: str,
    dataset: ConversationDataset,
    positions: Mapping[str, int],
    say: Callable[[str], None],
    *,
    max_new_tokens: int,
    flat: Collection[str] = (),
) -> None:
    """Warn where prompts with their pictures, and what is decoded after them, go beyond a draft's positions.

    TABED's M collapses on five pictures: 2,880 visual tokens against the 2,048 positions of its drafts, which were not
    trained on several pictures either. Neither raises an error, and both silently lower acceptance.

    Args:
        name: of the benchmark.
        positions: of each draft that sees the pictures, by its name.
        flat: the drafts without a newline, which read one tile of each picture.
    """
    for draft, held in positions.items():
        too_long = count_long(dataset, held - max_new_tokens, prompts=True, flat=draft in flat)
        if too_long.first is not None:
            say(
                f"warning: {name}: prompts that leave less than {max_new_tokens:,} of the {held:,} positions of the "
                f"draft {draft}: {too_long}. In mode M it proposes noise beyond its positions. Hints: mode P (pools "
                f"pictures 2 x 2, a quarter of their tokens); {MORE_POSITIONS}; train on several pictures (a mixture "
                "with such data)."
            )


def clock_of(name: str, target: Target) -> Clock | None:
    """Whose seconds count: the wall's (None: the loop's own clock), or those that the processor spent on the thread
    that decodes, which other work on the machine does not stretch.

    Raises:
        UserError: the decoding thread does not do all of the work.
    """
    if name == "wall":
        return None
    device, threads = target.device, torch.get_num_threads()
    if device.type != "cpu" or threads > 1:
        where = f"{threads} threads" if device.type == "cpu" else str(device)
        raise UserError(f"clock: thread counts the seconds of one thread, and decoding runs on {where}",
                        where="clock",
                        hint="start with OMP_NUM_THREADS=1 on a CPU, or leave clock out")  # fmt: skip
    return time.thread_time
