"""Makes a plan from a recipe: which stage produces what each stage needs, and which settings make a result stale."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.errors import UserError, did_you_mean
from ...core.fields import PLACES
from ...core.json_types import Json, JsonObject, listed, object_at, parts, text_at
from ...core.secrets import redact_tree
from ...core.section import FINGERPRINT
from ...core.weights_identity import weights_identity
from ...data.records.mixture import identities
from ...data.records.records import file_identity
from ...data.records.tars import expand_paths
from ...data.suites.benchmark_sets import TURN_SETS
from ...data.suites.suite import INDEX, suite_identity
from ...models.folders import shipped_folder
from ...trainers.run.matching import ABSENT, FINGERPRINTS, HIDDEN, RULED, named_weights
from ...trainers.run.stage import Planned, Stage
from ...trainers.stages.evaluate import EvaluateStage
from ...trainers.stages.regenerate import RegenerateStage
from ...trainers.stages.train import TrainCodes, TrainStage
from .preflight_inputs import sections as data_sections
from .schema import Recipe


def plan(recipe: Recipe, path: Path) -> list[Planned]:
    """Wire the stages. Raises `UserError` where one needs a thing that no earlier stage makes."""
    planned: list[Planned] = []
    for name, stage in recipe.stages.items():
        inputs: dict[str, str] = {}
        earlier = {p.name: p for p in planned}
        for thing, wanted in stage.needs().items():
            taken = {thing: earlier[maker] for thing, maker in inputs.items()}
            if (maker := _maker(planned, thing, wanted, name, recipe, path, taken)) is not None:
                inputs[thing] = maker
        for thing in sorted(stage.uses()):
            makers = [p for p in planned if thing in p.stage.makes()]
            misfits = stage.misfits(thing, makers, {thing: earlier[maker] for thing, maker in inputs.items()})
            if fitting := [maker.name for maker in makers if maker.name not in misfits]:
                inputs.setdefault(thing, fitting[-1])
        if "target" in inputs:
            inputs |= _beside_target(earlier[inputs["target"]], inputs)
        _check_written(name, stage, earlier, path)
        settings = _settings(recipe, name, inputs, planned)
        # Two paths that look like keys are stored as equal text: what is hidden when settings are stored has a hash.
        compared = {key: value for key, value in settings.items() if key not in RULED}
        usual = f"trains the {stage.trained}" if isinstance(stage, TrainStage) else stage.usual_purpose
        planned.append(
            Planned(
                name, stage, inputs, _hash(settings), recipe, earlier,
                redact_tree(settings) | {HIDDEN: _hash(compared)},
                purpose=stage.about or usual,
                own_target=stage.target if isinstance(stage, EvaluateStage) else None,
                is_small_net=isinstance(stage, TrainCodes) and stage.is_small_net,
            )
        )  # fmt: skip
    return planned


def _hash(settings: JsonObject) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _beside_target(trained: Planned, inputs: Mapping[str, str]) -> dict[str, str]:
    """What belongs to a target that a stage trained, where a later stage made another: the processor or text encoder
    that it was trained with, and the tokenizer of the pictures whose codes it learned.
    """
    codes = trained.maker("codes")
    makers = {"processor": trained.inputs.get("processor"), "vq": None if codes is None else codes.inputs.get("vq")}
    if "text" in trained.stage.makes():
        makers["text"] = trained.name
    return {thing: maker for thing, maker in makers.items() if maker is not None and thing in inputs}


def _maker(
    earlier: list[Planned], needed: str, wanted: str | None, name: str, recipe: Recipe, path: Path,
    inputs: Mapping[str, Planned],
) -> str | None:  # fmt: skip
    """The stage that is named, or the latest of those that `Stage.misfits` leaves.

    Args:
        needed: `drafter/finetune` is one of several things of a kind.
    """
    stage, thing = recipe.stages[name], needed.split("/")[0]
    planned = [p for p in earlier if thing in p.stage.makes()]
    misfits = stage.misfits(needed, planned, inputs)
    fitting = [p.name for p in planned if p.name not in misfits]
    if wanted in fitting or (wanted is None and fitting):
        return wanted or fitting[-1]
    if wanted is None:
        if thing in recipe.target.provides() or (recipe.drafter and thing in recipe.drafter.provides()):
            return None
        reasons = "; ".join(f"{maker} ({reason})" for maker, reason in misfits.items())
        problem = f"needs a {thing} and no earlier stage makes one" + f" that fits: {reasons}" * bool(reasons)
        outside = {"drafter": "", "tokenizer": ", or give target.tokenizer"}.get(thing, ", or give target.path")
        hint = f"put one before it, or name one (from=STAGE, or methods: {{NAME: {{drafter: STAGE}}}}){outside}"
    else:
        methods = [*stage.methods, *stage.drafters] if isinstance(stage, EvaluateStage) and thing == "drafter" else []
        others = [other for other in (*methods, *fitting) if other != wanted]
        hint = did_you_mean(wanted, others) if others else "no earlier stage makes one that fits"
        why = "is no earlier stage"
        if any(p.name == wanted for p in earlier):
            why = misfits.get(wanted, "makes none")
        elif wanted in recipe.stages and wanted != name:
            why = "runs later"
            hint = f"list all stages in `order`, or give what reads {wanted!r} a stage of its own"
        problem = f"takes its {thing} from {wanted!r}, which {why}"
    raise UserError(f"stage {name!r} {problem}", key=f"stages.{name}", where=str(path), hint=hint)


def _check_written(name: str, stage: Stage, earlier: dict[str, Planned], path: Path) -> None:
    """Raises `UserError` for data of a stage that does not write it: a mistyped split."""
    for data in data_sections(stage):
        maker = earlier.get(data.maker or "")
        # None of suites that are switched off, or of another kind's: the stage that reads them says so.
        written = maker.stage.written(data.is_suite) if maker else ()
        for wanted in map(str, listed(dict(data.section).get("path")) if written else ()):
            if not fnmatch.filter(written, wanted) and "{" not in wanted:
                key = f"stages.{name}.{data.key}"
                problem = f"{key} takes {wanted!r} of stage {data.maker}, which writes {', '.join(written)}"
                raise UserError(problem, key=f"{key}.path", where=str(path), hint=did_you_mean(wanted, written))


def _settings(recipe: Recipe, name: str, inputs: dict[str, str], earlier: list[Planned]) -> JsonObject:
    """Everything that a stage's result depends on, under the keys of a recipe. Tracking, paths and the number of ranks
    are left out, the engine where no weights are trained, and of target and drafter what the stage does not read.
    """
    stage = recipe.stages[name]
    section = _without_places(stage.model_dump(mode="json", context=FINGERPRINT))
    harmless = stage.harmless() if isinstance(stage, RegenerateStage) else set()
    for key in ("log_every", "num_workers", "checkpoints", "expected", "about", *harmless):
        section.pop(key, None)
    drafter = _without_places(stage.reads_of_drafter(recipe.drafter))
    target = _without_places(recipe.target.model_dump(mode="json", include=stage.reads_of_target))
    by_name = {p.name: p.fingerprint for p in earlier}
    # What the recipe's own stages write changes with each run.
    written = [os.path.realpath(Path(recipe.output) / name) for name in recipe.stages]
    return {
        "version": FINGERPRINTS,
        "stages": {name: section},
        "inputs": {thing: by_name[maker] for thing, maker in inputs.items()},
        "seed": recipe.seed,
        "target": target,
        "drafter": drafter,
        "engine": recipe.engine.model_dump(mode="json", exclude={"wait_minutes"}) if stage.trains else None,
        "data": _data_identity([section, drafter]),
        "outside": _outside({"target": target, "stages": {name: section}, "drafter": drafter}, written),
    }


def _without_places(section: object) -> Json:
    """Return a section, and those inside it, without the keys that only say where models lie."""
    match section:
        case list():
            return [_without_places(part) for part in section]
        case dict():
            return {key: _without_places(value) for key, value in section.items() if key not in PLACES}
    return section


def _outside(section: object, written: Sequence[str], key: str = "") -> dict[str, str]:
    """Dotted key -> identity of the weights or the file that a setting names by its path: `target.path`, a member's.

    Names on the Hub, what is not here and what this run writes are "absent": a name counts with its revision, which is
    a setting.
    """
    held = object_at(section) or {}
    if held.get("kind") in ("datasets", "webdataset", "coco"):
        return {}
    inner = [_outside(value, written, f"{key}.{name}" if key else name) for name, value in parts(section)]
    identities = {k: v for part in inner for k, v in part.items()}
    if "from_stage" in held:  # records and shards: `_data_identity`
        return identities
    named = dict(named_weights(held))
    if "metrics" in held:  # of quality: name of a judge's weights -> their path
        named |= {f"weights.{name}": path for name, path in held.get("weights", {}).items()}
    for name, path in named.items():
        is_written = any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in written)
        identities[f"{key}.{name}"] = ABSENT if is_written else weights_identity(Path(shipped_folder(path))) or ABSENT
    if (index := text_at(held, "class_index")) is not None:
        identities[f"{key}.class_index"] = _path_identity(Path(index))
    return identities


def _data_identity(section: object) -> list[str]:
    """Content of the files on disk that a stage reads; what another stage wrote is covered by its fingerprint. Folders
    of pictures count by their settings: reading all takes hours.
    """
    held = object_at(section) or {}
    if held.get("kind") == "encode" and held["from_stage"] is None:
        source = held["source"]
        if source["kind"] == "coco":
            return [_path_identity(Path(source["annotations"]))]
        if source["kind"] != "webdataset":
            return []
        try:
            return [file_identity(path) for path in expand_paths(source["path"])]
        except UserError:
            return [ABSENT]  # a dry run needs no data; the stage itself says what is missing
    if {"path", "from_stage"} <= held.keys():
        names = [] if held["from_stage"] is not None else listed(held["path"])
        folders = any(Path(name).is_dir() for name in names if text_at(name) is not None)  # of benchmark sets
        if "mixture_seed" in held and not folders:
            return identities(names)
        return [_path_identity(Path(name)) for name in names]
    return [identity for _, value in parts(section) for identity in _data_identity(value)]


def _path_identity(path: Path) -> str:
    """Hash a file's content; of a folder of shards that of its manifest, of a suite that of its records, of a folder
    with a published set of conversations that of the set's files.
    """
    if (path / INDEX).is_file():
        return suite_identity(path)
    if files := [f for about in TURN_SETS.values() for f in sorted(path.rglob(about.files)) if f.is_file()]:
        return hashlib.sha256("/".join(map(file_identity, files)).encode()).hexdigest()
    path = path / "manifest.json" if path.is_dir() else path
    return file_identity(path) if path.is_file() else ABSENT
