"""The folder that becomes the repository: weights and their files, recipe, provenance, report, stored prompt, list.

No text of it leaves with a secret in it, or with the names of folders of this machine.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import yaml

from ...core.errors import UserError
from ...core.files import LOG_BYTES, read_text, read_yaml
from ...core.json_types import Json, JsonMapping, JsonObject, object_at, text_at, with_each
from ...core.secrets import redact_tree, secret_in
from ...eval.published import KEY
from ...eval.published_section import PublishedSection
from ...eval.tables import html_page
from ...models.drafters.manifest import MANIFEST, read_manifest
from ...models.folders import CONFIG

# Of a stage's folder what a loader reads; checkpoints, logs and caches stay behind.
_MODEL_FILES = (
    CONFIG, "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
# Of a report's folder; every request's rows hold answers to other people's data, and stay behind.
_REPORT_FILES = ("*.md", "*.json", "*.png")
_NOT_REPORT = {"done.json", "fingerprint.json"}
_EXAMPLES = re.compile(r"^## Examples\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)  # other people's data, too
REPORT, CHECK = "report", "check"
_AGAIN = "restore the file, or run the evaluation again (restart=STAGE)"
_PART = r"[^\s/\\'\"`,;:=(){}\[\]<>|&]+"
_HOME = re.compile(rf"/(?:home|Users)/{_PART}")
# From the root (two parts at least: `/s` is none), from a home, or upwards; addresses and relative paths are not meant.
_PLACE = re.compile(rf"(?<![\w.~/*)\]}}>-])(?:(?:/{_PART}){{2,}}|~(?:/{_PART})+|(?:\.\./)+(?:{_PART}/)*{_PART})/?")


def copy_model(source: Path, folder: Path) -> None:
    """The drafter's own files. Raises `UserError` where there are no weights."""
    files = sorted({path for pattern in _MODEL_FILES for path in source.glob(pattern) if path.is_file()})
    if not any(path.suffix == ".safetensors" for path in files):
        raise UserError("no weights to publish (model.safetensors)", where=str(source),
                        hint="run the stage that trains the drafter")  # fmt: skip
    folder.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)


def copy_report(source: Path, folder: Path) -> list[str]:
    """Text, numbers and plots of an evaluation, its page made anew; returns the names of the plots at its top."""
    for pattern in _REPORT_FILES:
        for path in source.rglob(pattern):
            name = path.relative_to(source)
            if name.name in _NOT_REPORT or name.parts[0] in ("rows", "cache"):
                continue
            place = folder / REPORT / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".png":
                shutil.copyfile(path, place)
                continue
            text = read_text(path, hint=_AGAIN, max_bytes=LOG_BYTES)  # with commands and names of data
            place.write_text(without_places(_EXAMPLES.sub("", text)), encoding="utf-8")
    page = folder / REPORT / "report.md"
    if page.is_file():
        page.with_suffix(".html").write_text(html_page(page.read_text(encoding="utf-8"), page.parent), encoding="utf-8")
    return sorted(path.name for path in (folder / REPORT).glob("*.png"))


def copy_provenance(run: Path, recipe: JsonMapping, folder: Path) -> None:
    """`recipe.yaml`, as the run resolved it, and `run.yaml`: command, versions and commit; files without places."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(without_places(redact_tree(dict(recipe))), sort_keys=False))
    if (run / "run.yaml").is_file():
        about = read_yaml(run / "run.yaml", JsonObject, hint="restore the file, or run the recipe's command again")
        (folder / "run.yaml").write_text(yaml.safe_dump(without_places(about), sort_keys=False))


def write_manifest(source: Path, folder: Path, section: PublishedSection) -> None:
    """The stage's manifest with what opens the drafter elsewhere; places on this disk do not go out."""
    manifest = read_manifest(source)
    target = manifest.get("target")
    path = section.target.get("path")
    if (of_images := object_at(target)) is not None:
        manifest["target"] = of_images | {"path": path if path and "/" in path else None}
    elif text_at(target) is not None:
        manifest["target"] = path or "inline"
    # The stored prompt stays word for word; the section has no places.
    manifest = without_places(manifest) | {KEY: section.model_dump(mode="json", by_alias=True)}
    (folder / MANIFEST).write_text(json.dumps(redact_tree(manifest), indent=1, sort_keys=True))


def refuse_secrets(folder: Path, token: str | None) -> None:
    """Raises `UserError`, with file and rule, where a text of the folder holds a secret: a token, a password, or the
    value of a secret environment variable. Weights and pictures are not searched.

    Args:
        token: of the Hub's login.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, text = str(path.relative_to(folder)), ""
        if path.suffix not in (".safetensors", ".png", ".jpg", ".jpeg", ".webp", ".pdf"):
            # Pictures inside a page look like many a key.
            text = re.sub(r"base64,[\w+/=]+", "", path.read_text(encoding="utf-8", errors="replace"))
        rule = "the Hub's token" if token is not None and token in text else secret_in(f"{name}\n{text}")
        if rule is not None:
            raise UserError(
                f"{name} holds a secret (rule: {rule}; its value is not shown)", where=str(path),
                hint="the built folder is removed; find out which setting or file it came in by, take it out "
                "there, and change the secret: it may have been read",
            )  # fmt: skip


def without_places(value: object) -> Json:
    """A text, or a nested structure of them, with the last names of the paths in it."""
    return with_each(value, str, _text)


def _text(text: str) -> str:
    if text.startswith(("/", "~/", "../")) and "\n" not in text and "://" not in text:
        return _last(text)  # a path and nothing else, whatever blanks are in it
    # The longer one first: either may lie in the other.
    for known, shown in sorted(((Path.cwd(), "."), (Path.home(), "~")), key=lambda pair: -len(pair[0].parts)):
        if len(known.parts) > 1:
            text = re.sub(re.escape(str(known)) + r"(?![\w.-])", shown, text)
    return _PLACE.sub(lambda match: _last(match[0]), _HOME.sub("~", text))


def _last(path: str) -> str:
    """The last part; of a home itself not even that."""
    known = _HOME.sub("~", path.replace(str(Path.home()), "~") if len(Path.home().parts) > 1 else path)
    return Path(known).name
