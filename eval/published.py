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
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from ..core.batch import ImageRequest, Request
from ..core.errors import UserError, first_line
from ..core.files import checked
from ..core.import_paths import ALLOW_IMPORT, NotImported
from ..core.json_types import JsonObject, text_at
from ..core.pictures import IMAGE_MARK
from ..core.pretrained import without_bars
from ..core.results import SUMS, check_sums
from ..data.conversations import PromptFormat, encode, end_ids
from ..data.media import ImageReader
from ..data.processor_files import load_processor
from ..models.decoding.warp import Warp
from ..models.drafters import DRAFTER
from ..models.drafters.base import PLAIN, Drafter, DrafterConfig, DraftingOptions, for_decoding
from ..models.drafters.manifest import MANIFEST, read_manifest
from ..models.drafters.modes import ImageSubstitutes
from ..models.folders import opened_target
from ..models.hub import is_somewhere
from ..models.stored import check_types
from ..models.targets.generators import AnyTarget, image_section
from .loop import Decoding, Generation, generate
from .pair import Pair, open_pair
from .policies import Draw
from .published_section import PublishedSection, UserRequest
from .rules import RULES

KEY = "published"
LOST_TARGET = "the target of this drafter was on the disk of whoever trained it"
_GIVE_TARGET = "give its folder as target="
_PUBLISHER = "use the version that published it, or fetch the folder again"
_TARGET: TypeAdapter[AnyTarget] = TypeAdapter(AnyTarget)
# Part -> folder or Hub id. A language target is one part; a generator may keep its tokenizer and encoder elsewhere.
Sources = Mapping[str, str | Path]


# Where a token came from: the prefill, an accepted draft, or the target, which adds one to what it accepts.
Origin = Literal["prefill", "draft", "target"]


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
    def origins(self) -> list[Origin]:
        """The origin of each generated token, in their order."""
        origins: list[Origin] = ["prefill"]
        for cycle in self.generation.cycles:
            accepted = min(cycle.num_accepted, cycle.num_emitted)
            origins.extend("draft" for _ in range(accepted))
            origins.extend("target" for _ in range(cycle.num_emitted - accepted))
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

    def say(self, asked: UserRequest, folder: Path, *, plain: bool = False) -> Answer:
        """The same for a stored prompt, whose pictures lie in `folder`."""
        generator = torch.Generator().manual_seed(self.seed)
        drafter = None if plain else self.drafter
        generation = generate(self.target, drafter, self.ask(asked, folder), self.decoding, generator)
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
    folder = fetch(source, revision)
    check_sums(folder)
    try:
        section = read_published(folder, allow_import=allow_import)
    except NotImported as error:
        if target is None and lost_target(folder):  # both at once
            hint = f"{error.hint}; {_GIVE_TARGET}"
            raise NotImported(f"{error.problem}; and {LOST_TARGET}", where=error.where, hint=hint) from None
        raise
    if not (folder / SUMS).is_file():
        hint = "fetch the folder again: without its list nothing shows whether a file was changed"
        raise UserError(f"{SUMS} is missing", where=str(folder / SUMS), hint=hint)
    return assemble(folder, section, target, allow_import=allow_import)


def fetch(source: str | Path, revision: str | None) -> Path:
    """A folder as it is; a Hub id downloaded whole."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        # The list covers the whole folder, so all of it is fetched: a report is small beside weights.
        return Path(snapshot_download(str(source), revision=revision))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(source)!r} is no directory, and cannot be fetched from the Hub: {first_line(error)}",
            hint="check the name, the network and your login (hf auth login), or give a directory",
        ) from error


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


def _sections(section: PublishedSection, path: Path, allow_import: bool) -> tuple[AnyTarget, DrafterConfig]:
    """The sections of the target and of the drafter, under the bounds of a recipe; and what decoding changes of it."""
    # A folder may hold a number that its recipe wrote by hand when that was not checked.
    written = section.target | ({"num_token_ids": None} if "num_token_ids" in section.target else {})
    config = _checked(written, _TARGET, f"{path}, {KEY}.target", allow_import)
    trained = _checked(section.drafter, DRAFTER, f"{path}, {KEY}.drafter", allow_import)
    try:
        for_decoding(trained, **_changed(section))
    except ValueError as error:  # pydantic's, too
        where = f"{path}, {KEY}.decoding"
        raise UserError(f"no settings of this drafter: {first_line(error)}", where=where, hint=_PUBLISHER) from error
    return config, trained


def _changed(section: PublishedSection) -> JsonObject:
    """What decoding changes of the drafter as trained."""
    mode = section.decoding.mode
    return section.decoding.reading | ({} if mode is None else {"mode": mode})


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
    config, trained = _sections(section, folder / MANIFEST, allow_import)
    with without_bars(in_terminals=True):
        if config.draws_images:
            parts = {thing: Path(place) for thing, place in folders.items()}
            return _drawing(
                open_pair(image_section(config).placed(parts), parts, device=device), folder, section, trained
            )
        source = folders.get("target") or config.path
        if source is None or not is_somewhere(str(source)):
            raise UserError(LOST_TARGET, hint=_GIVE_TARGET)
        pair = open_pair(config, folders, device=device, section=section.target | {"path": str(source)})
        return _answering(pair, folder, section, trained)


def _checked(values: object, schema: TypeAdapter[Any], where: str, allow_import: bool) -> Any:
    context = ALLOW_IMPORT if allow_import else None
    return checked(values, schema, where=where, hint=_PUBLISHER, context=context)


def _drawing(pair: Pair, folder: Path, section: PublishedSection, trained: DrafterConfig) -> Speculator:
    generator: Any = pair.generator
    target, drafter = pair.target, _checked_drafter(pair, folder, trained)
    decoding = _decoding(section, grid=target.grid, length=target.num_codes, eos=())

    def ask(asked: UserRequest, _: Path) -> ImageRequest:
        return generator.request(asked.text, asked.label, "asked")

    def render(tokens: list[int]) -> Any:
        return generator.pictures(target.codes(tokens)[None])[0]

    return Speculator(target, drafter, decoding, section.seed, ask, render)


def _answering(pair: Pair, folder: Path, section: PublishedSection, trained: DrafterConfig) -> Speculator:
    target, processor = pair.target, pair.processor
    assert processor is not None
    most, asked = target.decoder.max_positions, section.decoding.max_new_tokens
    if most is not None and asked > most:
        raise UserError(
            f"decoding.max_new_tokens is {asked:,}, and the target has {most:,} positions",
            where=f"{folder / MANIFEST}, {KEY}", hint=_PUBLISHER,
        )  # fmt: skip
    substitutes = ImageSubstitutes.of(processor.tokenizer, newline_id=processor.newline_id)
    # The proposal that decoded the stored prompt: as trained, with the decoding's own settings.
    decoded = for_decoding(trained, **_changed(section))
    drafter = _checked_drafter(pair, folder, trained, decoded, DraftingOptions(substitutes))
    own_image_processor = load_processor(folder) if section.drafter.get("pictures") == "own" else None
    listed = section.decoding.end_ids
    ends = end_ids(processor, section.prompt_format) if listed is None else tuple(listed)
    decoding = _decoding(section, grid=None, length=section.decoding.max_new_tokens, eos=ends)

    def ask(asked: UserRequest, place: Path) -> Request:
        request = read_request(asked, place, section.prompt_format, section.looking.image_reader(processor))
        if own_image_processor is None:
            return request
        image_reader = section.looking.image_reader(own_image_processor, drafter=True)
        return replace(request, drafter_view=read_request(asked, place, section.prompt_format, image_reader))

    def render(tokens: list[int]) -> str:
        return str(processor.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    return Speculator(target, drafter, decoding, section.seed, ask, render)


def _checked_drafter(
    pair: Pair,
    folder: Path,
    trained: DrafterConfig,
    decoded: DrafterConfig | None = None,
    options: DraftingOptions = PLAIN,
) -> Drafter:
    """The proposal of the folder's weights, which must be of the types that it names."""
    check_types(folder, pair.module(trained, folder, decoded))
    return pair.drafter(trained, folder, decoded, options)


def _decoding(section: PublishedSection, *, grid: int | None, length: int, eos: tuple[int, ...]) -> Decoding:
    asked = section.decoding
    return Decoding(
        asked.tree.build(grid=grid, seed=section.seed),
        RULES["sampling" if asked.temperature else "greedy"],
        Draw(asked.draw),
        Warp(asked.temperature, asked.top_k, asked.top_p),
        length,
        eos,
    )


def read_request(asked: UserRequest, folder: Path, form: PromptFormat, image_reader: ImageReader) -> Request:
    text = asked.text
    if asked.pictures and IMAGE_MARK not in text:
        text = f"{IMAGE_MARK}\n" * len(asked.pictures) + text
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": ""}]
    record: JsonObject = {"conversations": turns}
    if asked.pictures:
        record["image"] = asked.pictures
    media = image_reader.media(record, folder, folder)
    encoded = encode(turns, form, image_reader.processor, pictures=media.pictures, open_ended=True)
    ids, modality = torch.tensor(encoded.ids), torch.tensor(encoded.modality, dtype=torch.int8)
    return Request(ids, modality, media.pixels(), "asked", media.pictures)
