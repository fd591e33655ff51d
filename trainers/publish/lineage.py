"""Where a drafter came from: the stages that trained it, their data and what came of them, the weights it began as, and
whose terms it carries.

Read from the resolved recipe (as the run's `recipe.yaml` has it) and from the stages' folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...core.json_types import JsonMapping, JsonObject, listed, object_at, text_at
from ...core.results import DONE, read_mark
from ...eval.run_reports import read_curves
from ...models.drafters.base import DrafterConfig
from ...models.folders import PREFIX, shipped_name
from ..run.context import Context

SCRATCH = "scratch"
SYNTHETIC_DATASET = "draftsmith shapes world"
# Sections of a stage that name files of data, or the stage that wrote them.
_DATA = ("data", "source", "answers", "prompts")


@dataclass(frozen=True)
class Trained:
    """One stage of a drafter's training, as a row of the card's table."""

    name: str
    trains: str
    data: str
    length: str  # "300 steps" or "1 epoch"
    batch_size: int | None
    rate: str
    loss: float | None  # the last that was logged
    time: str  # in hours, under 0.1 in minutes


def trained_by(stages: JsonMapping, name: str) -> list[str]:
    """The `train` stages that made the drafter of stage `name`, the first one first."""
    order, names = list(stages), [name]
    while (start := stages[names[-1]].get("from")) != SCRATCH:
        # Without `from` a stage trains the recipe's own drafter on, and none that a stage has for itself.
        earlier = [n for n in order[: order.index(names[-1])] if _trains_drafter(stages[n]) and not _own(stages[n])]
        if object_at(start) is not None or (start is None and not earlier):
            break
        names.append(start if start is not None else earlier[-1])
    return names[::-1]


def _trains_drafter(stage: JsonMapping) -> bool:
    return stage.get("kind") == "train" and stage.get("model", "drafter") == "drafter"


def _own(stage: JsonMapping) -> bool:
    return stage.get("drafter") is not None


def finished(stages: JsonMapping) -> list[str]:
    """The `train` stages whose drafter no later stage trains on: the recipe's own before those of stages."""
    lines = {name: trained_by(stages, name) for name, stage in stages.items() if _trains_drafter(stage)}
    last = [name for name in lines if not any(name in line[:-1] for line in lines.values())]
    return sorted(last, key=lambda name: any(_own(stages[one]) for one in lines[name]))


def data_of(stages: JsonMapping, name: str) -> list[str]:
    """Names of the data that a stage read, through the stages that prepared it: files by their name alone."""
    return list(dict.fromkeys(_data_of(stages, name, set())))


def _data_of(stages: JsonMapping, name: str, visited: set[str]) -> Iterator[str]:
    if name in visited or name not in stages:
        return
    visited.add(name)
    stage = stages[name]
    if stage.get("kind") == "generate":
        yield SYNTHETIC_DATASET
        return
    for key in _DATA:
        if (section := object_at(stage, key)) is None:
            continue
        source = section.get("from")
        if source is None and key == "source" and section.get("kind") in ("cached", "cached_on_first_epoch"):
            source = _latest(stages, name, lambda stage: stage.get("kind") == "cache")
        if source is None and key == "data" and not section.get("path"):
            source = _latest(stages, name, _writes_codes)
        for maker in listed(source):
            yield from _data_of(stages, maker, visited)
        # With `from` on the stage itself, paths are inside what that stage wrote.
        paths = section.get("path") or section.get("annotations")
        if source is None and paths and not (stage.get("kind") == "encode" and stage.get("from")):
            yield from (Path(str(path)).name for path in listed(paths))
    # An `encode` stage's own input.
    if stage.get("kind") == "encode" and (maker := text_at(stage, "from")) is not None:
        yield from _data_of(stages, maker, visited)


def _writes_codes(stage: JsonMapping) -> bool:
    """Encoded pictures, or what the target drew; of pixels alone no drafter learns."""
    if stage.get("kind") == "encode":
        return "codes" in (stage.get("write") or ("codes",))
    return stage.get("kind") == "regenerate" and stage.get("prompts") is not None


def _latest(stages: JsonMapping, name: str, makes: Callable[[JsonMapping], bool]) -> str | None:
    before = list(stages)[: list(stages).index(name)]
    return next((n for n in reversed(before) if makes(stages[n])), None)


def training_table(stages: JsonMapping, names: list[str], run: Path) -> list[Trained]:
    """A row for each of the stages `names`, whose folders lie in `run`."""
    rows = []
    for name in names:
        stage, done = stages[name], read_mark(run / name / DONE)
        number, what = (stage["steps"], "step") if stage.get("steps") else (stage.get("epochs"), "epoch")
        # A variable's number is text: `${oc.env:STEPS}`.
        length = f"{number:,} {what}{'s' * (number != 1)}" if isinstance(number, int) else f"{number} {what}s"
        time = "-"
        if done is not None and done.seconds is not None:
            time = f"{done.seconds / 3600:.2f} h" if done.seconds >= 360 else f"{done.seconds / 60:.2g} min"
        losses = read_curves(run / name / "metrics.jsonl").get("loss")
        rows.append(Trained(
            name, ", ".join(stage.get("trainable") or ["head"]), ", ".join(data_of(stages, name)) or "-", length,
            stage.get("batch_size"), str((stage.get("optim") or {}).get("lr", "-")),
            losses[-1][1] if losses else None, time,
        ))  # fmt: skip
    return rows


# What a drafter that is to be published was made from, by names that others know, and where it lies here.


def target_name(context: Context) -> str:
    """What a target without a Hub id is called."""
    path = context.target.path
    if "target" in context.inputs:
        began = None if path is None else _shipped(path) or Path(path).name
        return "a target that its run trained" + (f", from `{began}`" if began else "")
    if named := _shipped(str(path)):
        return f"`{named}`, which comes with draftsmith"
    return f"`{Path(str(path)).name}`, a target that is not on the Hub under this name"


def parts_of(
    context: Context, drafter: DrafterConfig | JsonMapping | None, target: str | None, starts: Iterable[str],
    datasets: Iterable[str],
) -> list[tuple[str, str]]:  # fmt: skip
    """What the drafter was made from, whose licences the card follows: (role, name).

    Args:
        drafter: its section.
        starts: heads outside the run that it was trained on from.
    """
    # A target that the run trained has the terms of its data, and of the weights that it was trained from.
    path = context.target.path
    named = target or (None if path is None else hub_id(path) or _shipped(path) or Path(path).name)
    parts = [("target", named)] if named else []
    parts += [("initial weights", name) for name in began_as(drafter, "language_model", "path")]
    parts += [("initial weights", Path(start).name if Path(start).is_dir() else start) for start in starts]
    parts += [("vision tower", name) for name in began_as(drafter, "vision_tower")]
    return parts + [("data", name) for name in datasets]


def sources_of(context: Context, base: str | None) -> dict[str, Path] | None:
    """Where the target's parts lie here: of stages, or a directory of the recipe; None: the Hub or the package
    has them.

    Args:
        base: Hub id that the manifest names the target by, in place of the recipe's path.
    """
    path = context.target.path
    if base is None and "target" not in context.inputs and path is not None and _shipped(path):
        return None  # with the processor that it brings, which the run's own stages have from there
    things: tuple[str, ...] = ("target", "processor", "vq", "text")
    folders = {thing: context.inputs[thing] for thing in things if thing in context.inputs}
    for thing, place in (("target", context.target.path), ("vq", dict(context.target).get("vq"))):
        if (named := text_at(place)) is not None and Path(named).is_dir():
            folders.setdefault(thing, Path(named))
    return folders or None


def hub_id(value: object) -> str | None:
    """A setting that names a repository of the Hub, and no directory here."""
    name = text_at(value)
    return name if name is not None and name.count("/") == 1 and not Path(name).is_dir() else None


def _shipped(place: str) -> str | None:
    """`shipped:NAME` of a directory of the package."""
    return name if (name := shipped_name(place)).startswith(PREFIX) else None


def began_as(drafter: DrafterConfig | JsonMapping | None, *keys: str) -> list[str]:
    """Whose weights a drafter began with: Hub ids, and directories by their last name, of which nothing is known."""
    values: JsonObject = {} if drafter is None else dict(drafter)
    named = [value for key in keys if (value := text_at(values, key)) is not None and value != "target"]
    return [hub_id(name) or Path(name).name for name in named]


# Whose terms a drafter carries. The table names what the publishers' own pages said when it was written, by whole
# names; what it does not know it says, and never guesses.


@dataclass(frozen=True)
class Licence:
    """Args:
    id: as the Hub writes it; None: not known here.
    restricts: what a user may not do with it as with Apache or MIT; empty: nothing.
    """

    id: str | None
    restricts: str = ""
    link: str = ""


@dataclass(frozen=True)
class Link:
    """One part of what the drafter was made from."""

    role: str  # target, initial weights, vision tower, data
    name: str
    licence: Licence


_APACHE, _MIT = Licence("apache-2.0"), Licence("mit")
_LLAMA2 = Licence(
    "llama2", "Llama 2 Community License: its use policy, and no use to improve other large language models",
    "https://ai.meta.com/llama/license/",
)  # fmt: skip
_LLAMA31, _LLAMA32 = (
    Licence(
        f"llama{version}", f"Llama {version} Community License: its use policy, and 'Llama' at the beginning of a "
        "derived model's name", f"https://www.llama.com/llama{version.replace('.', '_')}/license/",
    )
    for version in ("3.1", "3.2")
)  # fmt: skip
_CHAMELEON = Licence(
    "other", "Chameleon Research License: noncommercial research only", "https://ai.meta.com/resources/models-and-libraries/chameleon-license/",
)  # fmt: skip
_USER_LIMIT = Licence("other", "Qwen licence: commercial use above its user limit needs a permission")
_RESEARCH = Licence("other", "Qwen research licence: no commercial use")
_OPENAI = "answers were written by OpenAI's models, whose terms restrict training competing models with them"

# Patterns of Hub ids or file names, the first that fits counts.
_KNOWN: tuple[tuple[str, Licence], ...] = (
    (r"shipped:.*", _APACHE),  # comes with this package
    (r"llava-hf/llava-(1\.5|v1\.6-vicuna)-.*|liuhaotian/llava-v1\.[56]-(vicuna-)?(7b|13b).*", _LLAMA2),
    (r"llava-hf/llava-onevision-qwen2-(0\.5b|7b).*", _APACHE),
    (r"Qwen/Qwen2\.5-VL-3B.*", _RESEARCH),
    (r"Qwen/Qwen2(\.5)?-VL-72B.*", _USER_LIMIT),
    (r"Qwen/Qwen(2(\.5)?|3)-VL-.*", _APACHE),
    (r"Qwen/Qwen3\.5-.*", _APACHE),
    (r"mistralai/Mistral-Small-3\.1-.*|(mistralai|mistral-community)/pixtral-12b.*", _APACHE),
    (r"google/gemma-4-.*", _APACHE),
    (r"meta-llama/Llama-3\.1-.*", _LLAMA31),
    (r"meta-llama/Llama-3\.2-.*", _LLAMA32),
    (r"lmsys/vicuna-(7b|13b)-v1\.5.*|meta-llama/Llama-2-.*", _LLAMA2),
    (r"JackFram/llama-68m|weights/(smollm2|emoji-vlm)|HuggingFaceTB/SmolLM2-.*", _APACHE),
    (r"JackFram/llama-160m", Licence("other", "its page names the licence 'other', and gives no terms")),
    (r"google/siglip-.*", _APACHE),
    (r"openai/clip-.*", Licence(None)),
    # Converted weights lie in folders of these names (draftsmith convert).
    (r"FoundationVision/LlamaGen.*|llamagen-(c2i|t2i)-.*", _MIT),
    (r"GAIR/Anole-.*|leloy/Anole-.*|facebook/chameleon-.*|(anole|chameleon)-7b.*", _CHAMELEON),
    (r".*(llava_v1_5_mix665k|LLaVA-Instruct-150K|llava_instruct_150k).*", Licence("cc-by-4.0", _OPENAI)),
    (r".*(blip_laion_cc_sbu_558k|LLaVA-Pretrain|LLaVA-CC3M).*",
     Licence("other", "captions and pictures are under the terms of CC3M, LAION, SBU and BLIP")),
    (r".*ShareGPT.*", Licence(None, _OPENAI)),
    (r"draftsmith shapes world", Licence("apache-2.0")),
)  # fmt: skip


def licence_of(name: str) -> Licence:
    """By a Hub id or a file's name; `Licence(None)` where nothing is known."""
    known = (licence for pattern, licence in _KNOWN if re.fullmatch(pattern, name, re.IGNORECASE))
    return next(known, Licence(None))


def chain(parts: Iterable[tuple[str, str]]) -> list[Link]:
    """(role, name) -> what is known of each, each once."""
    return [Link(role, name, licence_of(name)) for role, name in dict.fromkeys(parts)]


def warnings(links: Iterable[Link]) -> Iterator[str]:
    """A sentence for each part that restricts, and for each of which nothing is known."""
    for link in links:
        part, restricts = f"{link.role} `{link.name}`", link.licence.restricts
        if restricts:
            yield f"The {part} restricts what this drafter may be used for: {restricts}."
        elif link.licence.id is None:
            yield f"The licence of the {part} is not known to draftsmith: look it up."


def own_licence(links: Iterable[Link], chosen: str | None) -> Licence:
    """What the card's front matter says: the recipe's word, or the target's terms where those are known, and those of
    the weights that it began as where they restrict more. `other` where several restrict.
    """
    if chosen is not None:
        return Licence(chosen)
    links = list(links)
    target = next((link.licence for link in links if link.role == "target"), Licence(None))
    weights = [link.licence for link in links if link.role in ("initial weights", "vision tower")]
    restricting = list(dict.fromkeys(one for one in (target, *weights) if one.restricts))
    if target.id is None or not restricting:
        return target
    return restricting[0] if len(restricting) == 1 else Licence("other")
