"""A published drafter beside its target, in one call: what a model card's snippet runs, and what it is checked with.

`draftsmith.json` of a published folder says under "published" which target it drafts for, how prompts become tokens,
how it decodes, and what it did on one stored prompt. The stored prompt must give the same output wherever the folder is
opened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ..core.batch import ImageRequest, Request
from ..core.errors import UserError, first_line
from ..core.files import checked
from ..core.import_paths import ALLOW_IMPORT
from ..core.json_types import JsonObject, text_at
from ..core.pictures import IMAGE_MARK
from ..core.pretrained import without_bars
from ..core.results import SUMS, check_sums
from ..data.conversations import PromptFormat, encode, end_ids
from ..data.media import ImageReader
from ..data.processor_files import load_processor
from ..models.decoding.warp import Warp
from ..models.drafters import DRAFTER
from ..models.drafters.base import Drafter, DrafterConfig, DraftingOptions, for_decoding
from ..models.drafters.manifest import MANIFEST, read_manifest
from ..models.drafters.modes import ImageSubstitutes
from ..models.folders import downloaded, opened_target
from ..models.hub import is_somewhere
from ..models.stored import check_types
from ..models.targets.table import AnyTarget, image_section
from .loop import Decoding, Generation, generate
from .pair import Pair, open_pair
from .policies import Draw
from .published_section import Expected, PublishedSection, UserRequest
from .rules import RULES

KEY = "published"
LOST_TARGET = "the target of this drafter was on the disk of whoever trained it"
_PUBLISHER = "use the version that published it, or fetch the folder again"
_TARGET: TypeAdapter[AnyTarget] = TypeAdapter(AnyTarget)
# Part -> folder or Hub id. A language target is one part; a generator may keep its tokenizer and encoder elsewhere.
Sources = Mapping[str, str | Path]


@dataclass(frozen=True)
class Answer:
    """A generated text or picture (str, or uint8 [3,S,S]), with its tokens, cycles and times in `generation`."""

    output: Any
    generation: Generation

    def __repr__(self) -> str:
        """Short: a generation holds the times of every cycle."""
        counts = f"{len(self.generation.tokens)} tokens in {len(self.generation.cycles)} cycles, tau {self.tau:.2f}"
        output = repr(self.output) if isinstance(self.output, str) else f"picture {tuple(self.output.shape)}"
        return f"Answer({output}, {counts})"

    @property
    def origins(self) -> list[str]:
        """Where each generated token came from: the prefill, an accepted draft, or the target, which adds one to what
        it accepts.
        """
        origins = ["prefill"]
        for cycle in self.generation.cycles:
            accepted = min(cycle.num_accepted, cycle.num_emitted)
            origins += ["draft"] * accepted + ["target"] * (cycle.num_emitted - accepted)
        return origins

    @property
    def tau(self) -> float:
        """Tokens emitted after the prefill over verification passes, bonus tokens included; plain decoding has 1. NaN:
        the first token ended the answer.
        """
        cycles = self.generation.cycles
        return sum(cycle.num_emitted for cycle in cycles) / len(cycles) if cycles else math.nan


@dataclass(frozen=True)
class Speculator:
    """A target, its drafter and how they decode. Call it with a prompt and the files of its pictures."""

    target: Any
    drafter: Any
    decoding: Decoding
    seed: int
    ask: Callable[[UserRequest, Path], Request | ImageRequest]
    render: Callable[[list[int]], Any]

    def __call__(self, text: str, *pictures: str | Path, label: int | None = None, plain: bool = False) -> Answer:
        """Answer a prompt, or draw a picture.

        Args:
            text: the question, or the caption to draw.
            pictures: files; their marks stand before the text where it has none.
            label: of generators that draw classes; the text then only names the picture.
            plain: without the drafter, which greedily gives the same tokens, one at a time.
        """
        # The caller's own files lie anywhere; those of a stored prompt stay in its folder.
        root = Path("/")
        for name in pictures:
            if not Path(name).is_file():
                raise UserError("no such picture", where=str(name), hint="name the file of a picture")
        names = [str(Path(os.path.realpath(name)).relative_to(root)) for name in pictures]
        return self.say(UserRequest(text=text, pictures=names, label=label), root, plain=plain)

    def say(self, prompt: UserRequest, folder: Path, *, plain: bool = False) -> Answer:
        """The same for a stored prompt, whose pictures lie in `folder`."""
        generator = torch.Generator().manual_seed(self.seed)
        drafter = None if plain else self.drafter
        generation = generate(self.target, drafter, self.ask(prompt, folder), self.decoding, generator)
        return Answer(self.render(generation.tokens), generation)


def open_published(
    source: str | Path,
    *,
    target: str | Path | Sources | None = None,
    revision: str | None = None,
    allow_import: bool = False,
) -> Speculator:
    """A published drafter, ready to decode, on CUDA where there is any.

    Args:
        source: Hub id, or a published folder.
        target: Hub id or directory of the target's weights; None: as the drafter's manifest names it. Of a generator
            whose parts lie apart a mapping: target, vq, text -> directory.
        revision: of the Hub; None: the newest.
        allow_import: import the packages whose drafter, tree or target the manifest names (`my_package.hydra:Config`).
            Their code runs, and a folder alone never makes it run; without this they must be imported already.

    Raises:
        UserError: a file is missing or not as it was published, the drafter was not made for this target, or its code
            is missing or must not be imported.
    """
    folder = downloaded(source, revision)  # whole, since its checksums are of all its files
    check_sums(folder)
    section = read_published(folder, allow_import=allow_import)
    if not (folder / SUMS).is_file():
        hint = "fetch the folder again: without its list nothing shows whether a file was changed"
        raise UserError(f"{SUMS} is missing", where=str(folder / SUMS), hint=hint)
    return assemble(folder, section, target, allow_import=allow_import)


def lost_target(folder: Path) -> bool:
    """Whether the manifest names no target that anybody else can find."""
    return not is_somewhere(text_at(read_manifest(folder), KEY, "target", "path"))


def read_published(folder: Path, *, allow_import: bool = False) -> PublishedSection:
    """What the manifest says.

    Args:
        allow_import: as of `open_published`.

    Raises:
        UserError: the folder was not published by this project.
    """
    path = folder / MANIFEST
    hint = "give a folder that the stage publish made, or the Hub id of one"
    section = read_manifest(folder).get(KEY)
    if section is None:
        raise UserError(f"{MANIFEST} does not say how this drafter was published", where=str(path), hint=hint)
    published: PublishedSection = _checked(section, TypeAdapter(PublishedSection), f"{path}, {KEY}", allow_import)
    _sections(published, path, allow_import)
    return published


def _sections(
    section: PublishedSection, path: Path, allow_import: bool
) -> tuple[AnyTarget, DrafterConfig, DrafterConfig]:
    """The sections of the target, of the drafter as trained and as it decodes, under the bounds of a recipe."""
    # A folder may hold a number that its recipe wrote by hand when that was not checked.
    written = section.target | ({"num_token_ids": None} if "num_token_ids" in section.target else {})
    config = _checked(written, _TARGET, f"{path}, {KEY}.target", allow_import)
    trained = _checked(section.drafter, DRAFTER, f"{path}, {KEY}.drafter", allow_import)
    mode = section.decoding.mode
    try:
        changed = section.decoding.reading | ({} if mode is None else {"mode": mode})
        return config, trained, for_decoding(trained, **changed)
    except ValueError as error:  # pydantic's, too
        where = f"{path}, {KEY}.decoding"
        raise UserError(f"no settings of this drafter: {first_line(error)}", where=where, hint=_PUBLISHER) from error


def assemble(
    folder: Path, section: PublishedSection, target: str | Path | Sources | None, *, allow_import: bool = False
) -> Speculator:
    """The speculator of a folder of weights: a published one, or a stage's before it is published."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folders: JsonObject = dict(target) if isinstance(target, Mapping) else {}
    if isinstance(target, str | Path):
        folders["target"] = target
    if isinstance(named := folders.get("target"), str):
        folders["target"] = opened_target(named, where="target")
    config, trained, decoded = _sections(section, folder / MANIFEST, allow_import)
    with without_bars(in_terminals=True):
        if config.draws_images:
            parts = {thing: Path(place) for thing, place in folders.items()}
            pair = open_pair(image_section(config).placed(parts), parts, device=device)
            check_types(folder, pair.module(trained, folder))
            return _drawing(pair, pair.drafter(trained, folder), section)
        source = folders.get("target") or config.path
        if source is None or not is_somewhere(str(source)):
            raise UserError(LOST_TARGET, hint="give its folder as target=")
        pair = open_pair(config, folders, device=device, section=section.target | {"path": str(source)})
        return _answering(pair, folder, section, trained, decoded)


def _checked(values: object, schema: TypeAdapter[Any], where: str, allow_import: bool) -> Any:
    return checked(values, schema, where=where, hint=_PUBLISHER, context=ALLOW_IMPORT if allow_import else None)


def _drawing(pair: Pair, drafter: Drafter, section: PublishedSection) -> Speculator:
    generator: Any = pair.generator
    target = pair.target

    def ask(prompt: UserRequest, _: Path) -> ImageRequest:
        return generator.request(prompt.text, prompt.label, "asked")

    def render(tokens: list[int]) -> Any:
        return generator.pictures(target.codes(tokens)[None])[0]

    decoding = _decoding(section, grid=target.grid, length=target.num_codes, eos=())
    return Speculator(target, drafter, decoding, section.seed, ask, render)


def _answering(
    pair: Pair, folder: Path, section: PublishedSection, trained: DrafterConfig, decoded: DrafterConfig
) -> Speculator:
    target, processor, form = pair.target, pair.processor, section.prompt_format
    assert processor is not None
    positions, length = target.decoder.max_positions, section.decoding.max_new_tokens
    if positions is not None and length > positions:
        raise UserError(
            f"decoding.max_new_tokens is {length:,}, and the target has {positions:,} positions",
            where=f"{folder / MANIFEST}, {KEY}", hint=_PUBLISHER,
        )  # fmt: skip
    check_types(folder, pair.module(trained, folder, decoded))
    substitutes = ImageSubstitutes.of(processor.tokenizer, newline_id=processor.newline_id)
    drafter = pair.drafter(trained, folder, decoded, DraftingOptions(substitutes))
    own_image_processor = load_processor(folder) if section.drafter.get("pictures") == "own" else None
    ends = section.decoding.end_ids
    eos = end_ids(processor, form) if ends is None else tuple(ends)

    def ask(prompt: UserRequest, place: Path) -> Request:
        request = read_request(prompt, place, form, section.looking.image_reader(processor))
        if own_image_processor is None:
            return request
        image_reader = section.looking.image_reader(own_image_processor, drafter=True)
        return replace(request, drafter_view=read_request(prompt, place, form, image_reader))

    def render(tokens: list[int]) -> str:
        return str(processor.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    decoding = _decoding(section, grid=None, length=length, eos=eos)
    return Speculator(target, drafter, decoding, section.seed, ask, render)


def _decoding(section: PublishedSection, *, grid: int | None, length: int, eos: tuple[int, ...]) -> Decoding:
    settings = section.decoding
    return Decoding(
        settings.tree.build(grid=grid, seed=section.seed), RULES["sampling" if settings.temperature else "greedy"],
        Draw(settings.draw), Warp(settings.temperature, settings.top_k, settings.top_p), length, eos,
    )  # fmt: skip


def read_request(prompt: UserRequest, folder: Path, form: PromptFormat, image_reader: ImageReader) -> Request:
    """A prompt as tokens, with its pictures in `folder`."""
    text = prompt.text
    if prompt.pictures and IMAGE_MARK not in text:
        text = f"{IMAGE_MARK}\n" * len(prompt.pictures) + text
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": ""}]
    record: JsonObject = {"conversations": turns} | ({"image": prompt.pictures} if prompt.pictures else {})
    media = image_reader.media(record, folder, folder)
    encoded = encode(turns, form, image_reader.processor, pictures=media.pictures, open_ended=True)
    ids, modality = torch.tensor(encoded.ids), torch.tensor(encoded.modality, dtype=torch.int8)
    return Request(ids, modality, media.pixels(), "asked", media.pictures)


def measure(speculator: Speculator, prompt: UserRequest, folder: Path) -> Expected:
    """Decode the stored prompt; also plainly, which greedily must give the same tokens.

    Raises:
        UserError: the drafter changes what the target says, or it says nothing, so that nothing was drafted.
    """
    import transformers

    answer = speculator.say(prompt, folder)
    tokens, cycles = answer.generation.tokens, answer.generation.cycles
    if not cycles:
        raise UserError("the answer to the stored prompt ends with its first token: nothing is drafted, and nothing "
                        "can be checked", where=f"prompt {prompt.text!r}",
                        hint="is the template right? Else name another prompt, or more new tokens")  # fmt: skip
    greedy = speculator.decoding.warp.greedy
    if greedy and tokens != speculator.say(prompt, folder, plain=True).generation.tokens:
        raise UserError("with the drafter the target says something else on the stored prompt",
                        hint="do not publish this: report it, with the recipe")  # fmt: skip
    device = speculator.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Expected(
        tokens=tokens, accepted=[cycle.num_accepted for cycle in cycles],
        emitted=sum(cycle.num_emitted for cycle in cycles), tau=answer.tau,
        measured={"device": name, "torch": torch.__version__, "transformers": transformers.__version__},
    )  # fmt: skip


def reproduce(
    source: str | Path, *, target: str | Path | Sources | None = None, allow_import: bool = False
) -> Expected:
    """Open a published folder and decode its stored prompt: what came of it must come again wherever it is opened.

    Args:
        target: as of `open_published`.
        allow_import: as of `open_published`.

    Raises:
        UserError: it does not come out as it was published.
    """
    folder = downloaded(source, None)
    speculator = open_published(folder, target=target, allow_import=allow_import)
    section = read_published(folder)
    if section.expected is None:
        raise UserError("no outcome is stored", where=str(folder / MANIFEST), hint="publish it again")
    result, expected = measure(speculator, section.prompt, folder), section.expected
    if result.tokens != expected.tokens or result.accepted != expected.accepted:
        raise UserError(
            f"the stored prompt has tau {result.tau:.4f} and was published with {expected.tau:.4f}"
            + ("" if result.tokens == expected.tokens else ", and its tokens differ"),
            where=str(folder / MANIFEST),
            hint=f"it was measured on {expected.measured}: in low precision another device may round otherwise; "
            "on the same one the weights or the target are not those that were published",
        )
    return result
