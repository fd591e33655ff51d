"""Published folders whose manifest, config or weights somebody changed, with a list of checksums that agrees again.

Whoever opens such a folder is told what is wrong by the file's name, before anything is allocated; or the change made
no difference, and the stored prompt gives the tokens that it was published with.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attempts.attempt import Attempt, Broken, check_refusal, last_words
from attempts.publications import opening
from attempts.recipes import with_little_memory

MANIFEST, CONFIG, WEIGHTS = "draftsmith.json", "config.json", "model.safetensors"
# What a key holds instead: of each kind of JSON, and numbers beyond what any setting has.
VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "null", "1e5", "../x", "/etc/passwd", "\x00", "a\ud800b", "ü 漢", "${seed}", -1, 0, 1,
    -3, 0.5, 1.5, -0.0, 1e-30, 10**7, 10**9, 1e12, 2**31, 2**63, 10**30, 1e300, float("nan"), float("inf"), [], [1],
    [[]], [None], {}, {"": 1}, {"kind": "lvlm"}, {"a": {"b": {}}}, [0] * 10_000, "x" * 100_000,
)  # fmt: skip
# Settings that once opened, or died where memory is taken.
BY_NAME: tuple[tuple[str, str, Any], ...] = (
    (MANIFEST, "published.decoding.top_p", -3), (MANIFEST, "published.decoding.top_p", 0),
    (MANIFEST, "published.decoding.top_k", -5), (MANIFEST, "published.decoding.top_k", 10**12),
    (MANIFEST, "published.decoding.max_new_tokens", 10**12), (MANIFEST, "published.decoding.max_new_tokens", 1e12),
    (MANIFEST, "published.decoding.max_new_tokens", 10**6), (MANIFEST, "published.decoding.temperature", 1e9),
    (MANIFEST, "published.decoding.tree", {"kind": "dynamic", "total": 10**9}),
    (MANIFEST, "published.decoding.tree", {"kind": "dynamic", "depth": 10**9, "width": 10**9}),
    (MANIFEST, "published.decoding.tree", {"kind": "chain", "gamma": 10**9}),
    (MANIFEST, "published.decoding.tree", {"kind": "sage", "max_nodes": 10**9, "max_width": 10**9}),
    (MANIFEST, "published.decoding.tree", {"kind": "static", "choices": [[10**9]]}),
    (MANIFEST, "published.decoding.tree", "1000000000-1000000000-8"),
    (MANIFEST, "published.decoding.reading", {"positions": "packed"}), (MANIFEST, "published.decoding.mode", "MT"),
    (MANIFEST, "published.format_version", 2), (MANIFEST, "published.seed", -1),
    (CONFIG, "text_config.num_hidden_layers", 10**7), (CONFIG, "text_config.hidden_size", 10**7),
    (CONFIG, "text_config.vocab_size", 10**12), (CONFIG, "text_config.intermediate_size", 2**20),
    (CONFIG, "vision_config.num_hidden_layers", 10**7), (CONFIG, "vision_config.image_size", 10**9),
    (CONFIG, "text_config.num_hidden_layers", 200), (CONFIG, "text_config.num_attention_heads", 4096),
    (CONFIG, "text_config.max_position_embeddings", 10**12),
)  # fmt: skip


def manifests(attempt: Attempt) -> str:
    """A published folder with one wrong thing in it, signed again."""
    from draftsmith.core.checksums import write_sums

    reference, dice = attempt.reference("lvlm"), attempt.dice
    folder = attempt.output
    shutil.copytree(reference.folder / "publish" / "repository", folder)
    name, what, must_refuse = dice.choice(WAYS)(dice, folder)
    attempt.tell(f"manifests: {name}: {what}")
    write_sums(folder)
    ended = attempt.work(with_little_memory(opening(folder, reference.folder / "target")), "open and reproduce")
    if ended.code == 0:
        if must_refuse:
            raise Broken("opened all the same")
        return "opened, with equal tokens"
    check_refusal(ended, name, MANIFEST)  # a changed file that other tokens come of is told by the stored prompt
    if "hint: " not in ended.text:
        raise Broken(f"no cure: {last_words(ended.text)}")
    return "refused by name"


def _value(dice: random.Random, folder: Path) -> tuple[str, str, bool]:
    """Another value, or no key, somewhere in a manifest or a config."""
    path = folder / dice.choice((MANIFEST, MANIFEST, CONFIG))
    tree = json.loads(path.read_text())
    start = tree["published"] if path.name == MANIFEST and dice.random() < 0.8 else tree
    parent, key = dice.choice(list(_places(start)))
    if dice.random() < 0.15:
        del parent[key]
        what = f"without {key}"
    else:
        parent[key] = dice.choice(VALUES)
        what = f"{key}: {repr(parent[key])[:60]}"
    path.write_text(json.dumps(tree))
    return path.name, what, False


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(what holds it, its key) of everything in a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in [(tree, key), *_places(value)]]


def _by_name(dice: random.Random, folder: Path) -> tuple[str, str, bool]:
    """One of the settings that once got through."""
    name, keys, value = dice.choice(BY_NAME)
    *above, last = keys.split(".")
    tree = parent = json.loads((folder / name).read_text())
    for key in above:
        parent = parent[key]
    parent[last] = value
    (folder / name).write_text(json.dumps(tree))
    return name, f"{keys}: {value!r}", keys != "published.decoding.mode"


def _unknown_key(dice: random.Random, folder: Path) -> tuple[str, str, bool]:
    """A key that no version has, in a section that is read."""
    tree = json.loads((folder / MANIFEST).read_text())
    section = dice.choice(
        [tree["published"], *(tree["published"][k] for k in ("decoding", "prompt", "drafter", "target"))]
    )
    section["of_nobody"] = dice.choice(VALUES)
    (folder / MANIFEST).write_text(json.dumps(tree))
    return MANIFEST, "a key of nobody", True


def _text(dice: random.Random, folder: Path) -> tuple[str, str, bool]:
    """A manifest or a config that is no JSON, or holds a key twice."""
    path = folder / dice.choice((MANIFEST, CONFIG))
    text = path.read_text()
    ways: dict[str, str | bytes] = {
        "cut": text[: dice.randrange(len(text))], "empty": "", "null": "null", "a list": f"[{text}]",
        "other bytes": text.encode("utf-16"), "a pickle": b"\x80\x04K\x01.", "deep": "[" * 200_000,
        "more behind it": text + "}", "a number without end": '{"published": ' + "9" * 10_000 + "}",
    }  # fmt: skip
    if path.name == MANIFEST:
        ways |= {"a key twice": '{"published": {}, ' + text.lstrip()[1:], "no section": "{}"}
    what = dice.choice(sorted(ways))
    content = ways[what]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path.name, what, True


def _kind_of_file(dice: random.Random, folder: Path) -> tuple[str, str, bool]:
    """Something else than a file, or far too much of one."""
    path = folder / dice.choice((MANIFEST, CONFIG, WEIGHTS))
    what = dice.choice(("a pipe", "a folder", "a device", "gone", "huge"))
    if what == "huge" and path.name != WEIGHTS:
        os.truncate(path, 2**29)
        return path.name, what, True
    path.unlink()
    makers: dict[str, Callable[[], Any]] = {
        "a pipe": lambda: os.mkfifo(path), "a folder": path.mkdir, "a device": lambda: path.symlink_to("/dev/zero"),
    }  # fmt: skip
    makers.get(what, lambda: None)()
    return path.name, what, True


def _weights(dice: random.Random, folder: Path) -> tuple[str, str, bool]:
    """Tensors of another type, another shape, not finite, or a file that is cut."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / WEIGHTS
    state = load_file(path)
    name = dice.choice(sorted(name for name, value in state.items() if value.dim() == 2))
    what = dice.choice(("float64", "float16", "int8", "NaN", "transposed", "missing", "unknown", "cut", "other bytes"))
    if what in ("float64", "float16"):  # said, and read: float16 rounds, and other tokens are refused then
        state = {key: value.to(getattr(torch, what)) for key, value in state.items()}
    elif what == "int8":
        state[name] = state[name].to(torch.int8)
    elif what == "NaN":
        state[name][0, 0] = float("nan")
    elif what == "transposed":
        state[name] = state[name].reshape(-1, 1).contiguous()
    elif what == "missing":
        del state[name]
    elif what == "unknown":
        state["of_nobody.weight"] = torch.zeros(3)
    save_file(state, path, {"format": "pt"})
    if what == "cut":
        os.truncate(path, dice.randrange(path.stat().st_size))
    elif what == "other bytes":
        path.write_bytes(dice.choice((b"\x80\x04K\x01.", b"\xff" * 64, b"{}")))
    named = MANIFEST if what in ("float16", "float64") else WEIGHTS
    return named, f"{name}: {what}", what not in ("float16", "float64")


WAYS = (_value, _value, _value, _by_name, _by_name, _unknown_key, _text, _kind_of_file, _weights)
