"""A stand-in for an engine, for `attempts.engine_answers`: it answers by a rule, and damages one of its files.

It runs in the place of an engine's worker (`python -I stand_in.py FOLDER`) and imports nothing of the project but the
module that those workers import. damage.json beside it: `workers` (where that module lies), `form`, `job`, `seed`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Lines = list[dict[str, Any]]
# Values that are no id; of those a line's other fields take, most are wrong for them, too.
NO_IDS: tuple[Any, ...] = (
    1.5, 7.0, -1, -(10**12), 10**6, 2**31, 2**70, True, False, "7", "", None, [7], [], {}, {"id": 7}, float("nan"),
    float("inf"), -float("inf"),
)  # fmt: skip


def of_line(change: Callable[[random.Random, dict[str, Any], list[int]], Any]) -> Callable[..., Any]:
    """A form that changes one drawn answer; `change` is given the dice, the answer and the ends."""

    def form(dice: random.Random, path: Path, ends: list[int]) -> None:
        value = json.loads(path.read_text())
        change(dice, dice.choice(value["answers"]), ends)
        path.write_text(json.dumps(value))

    return form


def of_text(change: Callable[[random.Random, str], str | bytes]) -> Callable[..., Any]:
    """A form that changes the file's text."""

    def form(dice: random.Random, path: Path, ends: list[int]) -> None:
        text = change(dice, path.read_text())
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return form


def in_its_place(make: Callable[[Path], Any]) -> Callable[..., Any]:
    """A form that puts something else than a file there."""

    def form(dice: random.Random, path: Path, ends: list[int]) -> None:
        path.unlink()
        make(path)

    return form


def wrong_id(dice: random.Random, line: dict[str, Any], ends: list[int]) -> None:
    line["tokens"][dice.randrange(len(line["tokens"]))] = dice.choice(NO_IDS)


def wrong_field(dice: random.Random, line: dict[str, Any], ends: list[int]) -> None:
    line[dice.choice(("prompt_tokens", "tokens", "stop"))] = dice.choice(NO_IDS)


def an_end_inside(dice: random.Random, line: dict[str, Any], ends: list[int]) -> None:
    line["tokens"][dice.randrange(len(line["tokens"]) - 1)] = dice.choice(ends)


def another_list(dice: random.Random, text: str) -> str:
    answers = json.loads(text)["answers"]
    changed = dice.choice((answers[:-1], [*answers, answers[0]], [], [answers], {"0": answers}, None, answers * 2))
    return json.dumps({"answers": changed})


def deeper(dice: random.Random, text: str) -> str:
    depth = dice.choice((3, 2000, 200_000))
    return '{"answers": ' + "[" * depth + "]" * depth + "}"


ANSWERS: dict[str, Callable[..., Any]] = {
    "no id": of_line(wrong_id),
    "a wrong field": of_line(wrong_field),
    "too many": of_line(lambda dice, line, ends: line["tokens"].extend([5] * dice.choice((1, 7, 10**6)))),
    "too few": of_line(lambda dice, line, ends: line.update(tokens=line["tokens"][: dice.randrange(3)])),
    "an end inside": of_line(an_end_inside),
    "no end": of_line(lambda dice, line, ends: line.update(stop="eos")),
    "an unknown reason": of_line(lambda dice, line, ends: line.update(stop=dice.choice(("abort", "error", "EOS", "")))),
    "a field is missing": of_line(lambda dice, line, ends: line.pop(dice.choice(sorted(line)))),
    "a field too many": of_line(lambda dice, line, ends: line.update({dice.choice(("logprobs", "", "states")): "x"})),
    "another number of answers": of_text(another_list),
    "a key twice": of_text(lambda dice, text: '{"answers": [], ' + text[1:]),
    "a field twice": of_text(lambda dice, text: text.replace('"stop"', '"tokens": [5], "stop"', 1)),
    "cut": of_text(lambda dice, text: text[: dice.randrange(len(text))]),
    "more behind it": of_text(lambda dice, text: text + dice.choice(("}", "{}", "x", text))),
    "other bytes": of_text(lambda dice, text: dice.choice((text.encode("utf-16"), b"\x80\x04" + text.encode(), b"\0"))),
    "deep": of_text(deeper),
    "a number without end": of_text(lambda dice, text: '{"answers": ' + "9" * 10_000 + "}"),
    "no JSON": of_text(
        lambda dice, text: dice.choice(("", "null", "[]", "7", "answers: []", "NaN", "{'answers': []}"))
    ),
    "huge": lambda dice, path, ends: os.truncate(path, dice.choice((2**27, 2**40))),
    "a pipe": in_its_place(os.mkfifo),
    "a folder": in_its_place(Path.mkdir),
    "a device": in_its_place(lambda path: path.symlink_to("/dev/zero")),
}
HARMLESS: dict[str, Callable[..., Any]] = {
    "nothing": lambda dice, path, ends: None,
    "printed in lines": of_text(lambda dice, text: json.dumps(json.loads(text), indent=2, sort_keys=True)),
    "a byte order mark": of_text(lambda dice, text: b"\xef\xbb\xbf" + text.encode()),
}


def _tensors(change: Callable[[random.Random, dict[str, Any]], Any]) -> Callable[..., Any]:
    def form(dice: random.Random, path: Path, ends: list[int]) -> None:
        from safetensors.numpy import load_file, save_file

        held = load_file(path)
        change(dice, held)
        save_file(held, path)

    return form


def other_shape(dice: random.Random, held: dict[str, Any]) -> None:
    states = held["hidden_states"]
    held["hidden_states"] = dice.choice(
        (states[:1], states[1:], states[:, :1], states[:, :, :1], states.reshape(-1), states[None], states[:0])
    ).copy()


def not_finite(dice: random.Random, held: dict[str, Any]) -> None:
    held["hidden_states"].flat[dice.randrange(held["hidden_states"].size)] = dice.choice((float("nan"), float("inf")))


def other_ids(dice: random.Random, held: dict[str, Any]) -> None:
    ids = held["token_ids"]
    ids[0] += 1
    held["token_ids"] = dice.choice((ids, ids[1:], ids.astype("float32"), ids[None], ids % 2 == 0))


def other_type(dice: random.Random, held: dict[str, Any]) -> None:
    held["hidden_states"] = held["hidden_states"].astype(dice.choice(("int32", "uint8", "bool")))


STATES: dict[str, Callable[..., Any]] = {
    "another shape": _tensors(other_shape),
    "not finite": _tensors(not_finite),
    "other ids": _tensors(other_ids),
    "another type": _tensors(other_type),
    "a tensor is missing": _tensors(lambda dice, held: held.pop(dice.choice(sorted(held)))),
    "cut": lambda dice, path, ends: os.truncate(path, dice.randrange(path.stat().st_size)),
    "other bytes": lambda dice, path, ends: path.write_bytes(dice.choice((b"\x80\x04K\x01.", b"\xff" * 64, b"{}"))),
    "huge": lambda dice, path, ends: os.truncate(path, 2**40),
    "gone": lambda dice, path, ends: path.unlink(),
    "a pipe": in_its_place(os.mkfifo),
    "a folder": in_its_place(Path.mkdir),
    "a device": in_its_place(lambda path: path.symlink_to("/dev/zero")),
}


def main(folder: Path) -> None:
    """Serve until the end, as an engine's worker does."""
    damage = json.loads(Path(__file__).with_name("damage.json").read_text())
    sys.path.append(damage["workers"])
    import draftsmith_jobs as jobs
    import numpy as np
    from safetensors.numpy import save_file

    given, dice = jobs.asked(folder), random.Random(damage["seed"])
    config = json.loads((Path(given["settings"]["model"]) / "config.json").read_text())
    side, ends = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"], [0]
    image, width = config["image_token_index"], config["text_config"]["hidden_size"]

    def answer(name: str, requests: Lines, pictures: Any) -> Lines:
        lines: Lines = []
        for number, request in enumerate(requests):
            ids = [token for one in request["ids"] for token in ([image] * side**2 if one == image else [one])]
            sampling, rule = request["sampling"], random.Random(str(request["ids"]))
            ends[:] = sampling.get("stop_token_ids") or [0]
            never = {*ends, *map(int, sampling.get("logit_bias") or {})}
            kept = [token for token in range(3, config["text_config"]["vocab_size"]) if token not in never]
            lines.append(
                {"prompt_tokens": len(ids), "tokens": rule.choices(kept, k=sampling["max_tokens"]), "stop": "length"}
            )
            if given["layers"] is not None:
                lines[-1]["states"] = f"{name}-{number}.safetensors"
                path = folder / "done" / lines[-1]["states"]
                drawn = np.random.default_rng(ids).normal(size=(len(ids), len(given["layers"]), width))
                save_file({"hidden_states": drawn.astype("float32"), "token_ids": np.array(ids)}, path)
        if int(name) == damage["job"] and damage["form"] in STATES and given["layers"] is not None:
            STATES[damage["form"]](dice, folder / "done" / dice.choice(lines)["states"], ends)
        return lines

    def replace(source: Path, destination: Path) -> None:
        if int(Path(destination).stem) == damage["job"] and (given["layers"] is None or damage["form"] not in STATES):
            (ANSWERS | HARMLESS)[damage["form"]](dice, Path(source), ends)
        os.replace(source, destination)

    jobs.os = SimpleNamespace(replace=replace)
    jobs.serve(folder, jobs.InTurn(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
