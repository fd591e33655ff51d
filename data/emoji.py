"""The data of emoji-vlm: emoji rendered on white, and records that ask about them, split by head noun.

`draftsmith fetch emoji` calls it with what lies in packages of npm: pictures, names with keywords, Unicode's groups.
A held-out noun stands in no text of training, so a model that names such a picture read it off the picture.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from ..core.json_types import JsonObject
from ..core.pictures import IMAGE_MARK

SIZE, _PLAIN_SIDE, _SIDES = 224, 200, (150, 216)  # in pixels: of a page, of a plain picture on it, of a drawn one
# Kind of question -> its wordings. Of QUESTIONS each asks for few words or one sentence, so that answers end.
CAPTIONS = {
    "naming": ("What is this?", "What does the picture show?", "What do you see?", "Name it."),
    "category": ("What kind of thing is it?", "What kind of thing does the picture show?"),
    "keywords": ("Give some keywords.", "Which keywords fit the picture?"),
}
QUESTIONS = {
    "naming": ("In three words, what is this?", "In one short sentence, what is this?"),
    "describing": ("Describe it in a few words.", "Describe what you see in one short sentence."),
    "using": ("Where do you find it? Answer in a few words.", "What is it good for? Use one short sentence."),
    "story": ("Tell a story about it in one short sentence.", "Write one short sentence that a poem could begin with."),
    "comparing": ("How do these two differ? Answer in a few words.", "What do they share? Use one short sentence."),
    "two_turns": ("What is this?", "What does the picture show?"),
}
_SECOND = "Describe it in a few words."  # of two turns
WORDING = hashlib.sha256(repr((CAPTIONS, QUESTIONS, _SECOND)).encode()).hexdigest()[:16]
_WORDING = " ".join([*itertools.chain(*CAPTIONS.values(), *QUESTIONS.values()), _SECOND])
_OBJECTS = {"Activities", "Animals & Nature", "Food & Drink", "Objects", "Travel & Places"}
_LEFT_OUT = {"Flags", "Component", "Symbols", "family", "time"}  # groups and subgroups
_HELD_PERCENT = 12  # of nouns
# What stands behind a name's head noun: "mug with straw" is a mug.
_REST = re.compile(r" (of|with|in|on|without|from|and|at|to|for|over|behind|blowing|fluttering|not|holding|facing)\b.*")
_IRREGULAR = {"mice": "mouse", "teeth": "tooth", "feet": "foot", "geese": "goose", "people": "person", "men": "man",
              "women": "woman", "children": "child", "leaves": "leaf", "knives": "knife"}  # fmt: skip
# A mirrored picture of these is another thing, or has letters the wrong way round.
_ONE_WAY = re.compile(r"\b((left|right)(wards?)?|facing|pointing|arrow|letters?|signs?|calendar|atm|newspaper|score|"
                      r"abc|medal|clef|input|numbers|points|clockwise|taxi|police|ambulance)\b")  # fmt: skip
_PLACES = 9  # of a picture, as in models/lite0.py
_NO_PHOTOGRAPHS = {"symbols", "cartoon", "toys", "plastic", "roadsigns", "flags"}  # folders of stamps


@dataclass(frozen=True)
class Item:
    """One thing with a name, or one picture of it."""

    code: str  # Unicode's, in hex with hyphens
    name: str
    category: str
    keywords: tuple[str, ...] = ()
    is_object: bool = True  # so that its noun may be held out
    paths: tuple[str, ...] = ()  # of renderings of one of its pictures, the plain one first


def _with_article(name: str) -> str:
    article = "" if re.search("[^su]s$", _last_word(name)) else "an " if name[0] in "aeiou" else "a "
    return article + name


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _words(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def _last_word(name: str) -> str:
    return ["", *_words(_REST.sub("", name))][-1]


def head_noun(name: str) -> str:
    """The word that says what a name's thing is, in the singular: apple of "green apple", mug of "mug with straw"."""
    word = _last_word(name)
    if word in _IRREGULAR or not re.search("..[^sui]s$", word):
        return _IRREGULAR.get(word, word)
    return re.sub("(?<=sh|ch|ss)es$|(?<=x)es$|s$", "", re.sub("(?<=..)ies$", "ys", word))


@functools.cache
def _singulars(word: str) -> frozenset[str]:
    """What the word may be the plural of, and the word: too many rather than too few."""
    return frozenset((word, head_noun(word), word.removesuffix("s"), word.removesuffix("es")))


def holds(text: str, nouns: frozenset[str]) -> bool:
    """Whether one of the nouns stands in the text, in the singular or the plural."""
    return any(not nouns.isdisjoint(_singulars(word)) for word in _words(text))


def bare(code: str) -> str:
    """A code without the mark that only asks for a picture, which files' names have or have not."""
    return code.lower().replace("-fe0f", "")


def items(names: JsonObject, groups: Sequence[JsonObject]) -> list[Item]:
    """The emoji that show something, in Unicode's order. `names`: character -> name and keywords (emojilib's file);
    `groups`: codes, char, group and subgroup of each (the file of emoji.json).
    """
    known = {char.replace("\ufe0f", ""): texts for char, texts in names.items()}
    result: dict[str, Item] = {}
    for entry in groups:
        code, texts = bare(entry["codes"].replace(" ", "-")), known.get(entry["char"].replace("\ufe0f", ""))
        is_toned = re.search("1f3f[b-f]", code)
        if is_toned or code in result or not texts or _LEFT_OUT & {entry["group"], entry["subgroup"]}:
            continue
        name, *others = dict.fromkeys(text.replace("_", " ").lower() for text in texts)
        keywords = tuple(text for text in others if re.fullmatch("[a-z][a-z' -]+", text))
        result[code] = Item(code, name, entry["subgroup"].replace("-", " "), keywords, entry["group"] in _OBJECTS)
    return list(result.values())


def split(every: Sequence[Item]) -> tuple[list[Item], list[Item], frozenset[str]]:
    """Items to train on, held-out items, and the held-out nouns, which no text of the first ones has."""
    nouns = {head_noun(item.name) for item in every if item.is_object}
    draws = {noun: int(hashlib.md5(noun.encode()).hexdigest(), 16) % 100 for noun in nouns}
    held = frozenset(noun for noun in nouns if draws[noun] < _HELD_PERCENT and not holds(_WORDING, frozenset([noun])))
    training = [
        replace(item, category=" ".join(word for word in item.category.split() if not holds(word, held)),
                keywords=tuple(text for text in item.keywords if not holds(text, held)))
        for item in every if not holds(item.name, held)
    ]  # fmt: skip
    return training, [item for item in every if item.is_object and head_noun(item.name) in held], held


def rendered(data: bytes, draw: random.Random | None = None, *, flips: bool = True) -> bytes:
    """A picture on white as JPEG of 224 x 224: 200 pixels in the middle, or of a drawn size, place and side."""
    picture = Image.open(io.BytesIO(data)).convert("RGBA")
    side = draw.randint(*_SIDES) if draw else _PLAIN_SIDE
    width, height = (max(1, round(length * side / max(picture.size))) for length in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (draw.randint(0, SIZE - length) if draw else (SIZE - length) // 2 for length in (width, height))
    if draw and flips and draw.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    page = Image.new("RGB", (SIZE, SIZE), "white")
    page.paste(picture, (left, top), picture)
    out = io.BytesIO()
    page.save(out, "JPEG", quality=90)
    return out.getvalue()


def _drawn(folder: Path, chosen: Sequence[Item], pictures: Mapping[str, Mapping[str, bytes]], seed: int, more: int
           ) -> list[Item]:  # fmt: skip
    """An item for each picture, with the renderings that were written: a plain one and `more`."""
    (folder / "pictures").mkdir(exist_ok=True)
    result = []
    for item, (kind, of) in itertools.product(chosen, pictures.items()):
        if item.code in of:
            ends = ["", *(f"-{number}" for number in range(1, more + 1))]
            paths = [f"pictures/{kind}-{item.code}{end}.jpg" for end in ends]
            draw, flips = random.Random(f"{seed} {paths[0]}"), not _ONE_WAY.search(item.name)
            for path in paths:
                (folder / path).write_bytes(rendered(of[item.code], draw if path != paths[0] else None, flips=flips))
            result.append(replace(item, paths=tuple(paths)))
    return result


def _record(name: object, kind: str, about: Sequence[Item], paths: Sequence[str], *texts: str) -> JsonObject:
    """A record: the question, in front of the pictures, and what comes after it, turn by turn."""
    question = " ".join([texts[0], *(f"Picture: {IMAGE_MARK}" for _ in paths)])
    turns = [{"from": ("human", "gpt")[at % 2], "value": text} for at, text in enumerate([question, *texts[1:]])]
    return {
        "id": f"{kind}-{name}", "image": paths[0] if len(paths) == 1 else list(paths), "conversations": turns,
        "kind": kind, "name": " and ".join(item.name for item in about),
        # The name alone: a small language model that reads keywords, too, lists them in its answer.
        "told": [f"{_with_article(item.name)}." for item in about],
    }  # fmt: skip


def captions(chosen: Sequence[Item], draw: random.Random) -> Iterator[JsonObject]:
    """A question with its answer for each rendering: the name of a plain one; of others category or keywords, too.
    `words` are what a picture's nine places are about, for a stage `contrast`: four things, in turn.
    """
    for item in chosen:
        answers = {"naming": _with_article(item.name), "category": item.category,
                   "keywords": ", ".join(item.keywords[:3])}  # fmt: skip
        for path in item.paths:
            kinds = [kind for kind in ("naming", *CAPTIONS, "naming") if answers[kind]]
            kind = "naming" if path == item.paths[0] else draw.choice(kinds)
            question, answer = draw.choice(CAPTIONS[kind]), _sentence(answers[kind])
            words = [item.name, head_noun(item.name), item.category, ", ".join(item.keywords[:6])]
            yield _record(Path(path).stem, kind, [item], [path], question, answer) | {
                "words": list(itertools.islice(itertools.cycle(text or item.name for text in words), _PLACES))
            }


def questions(chosen: Sequence[Item], count: int, draw: random.Random, *, plain: bool) -> Iterator[JsonObject]:
    """Questions without answers, each kind and each picture as often as the others. `plain`: about plain renderings."""
    order = itertools.chain.from_iterable(iter(lambda: draw.sample(chosen, len(chosen)), []))
    for number, kind, item in zip(range(count), itertools.cycle(QUESTIONS), order, strict=False):
        about = [item]
        if kind == "comparing":
            about += [draw.choice([other for other in chosen if other.name != item.name])]
        paths = [one.paths[0] if plain else draw.choice(one.paths) for one in about]
        more = (_sentence(_with_article(item.name)), _SECOND) if kind == "two_turns" else ()
        yield _record(number, kind, about, paths, draw.choice(QUESTIONS[kind]), *more)


def write_emoji(
    folder: Path, every: Sequence[Item], pictures: Mapping[str, Mapping[str, bytes]], *, seed: int = 0,
    num_questions: int = 1500, num_evaluated: int = 240,
) -> JsonObject:  # fmt: skip
    """Write pictures and records, and return what the manifest says of them. `pictures`: set -> code -> PNG or WebP.
    `held_out_names.json` and `trained_names.json` have plain pictures with their names.
    """
    training, held, nouns = split(every)
    training, held = _drawn(folder, training, pictures, seed, 2), _drawn(folder, held, pictures, seed, 0)
    draws = {name: random.Random(f"{seed} {name}") for name in ("captions", "questions", "held_out", "trained")}
    records = {"captions": list(captions(training, draws["captions"])),
               "questions": list(questions(training, num_questions, draws["questions"], plain=False))}  # fmt: skip
    for record in itertools.chain(*records.values()):
        texts = [*record["told"], *(turn["value"] for turn in record["conversations"])]
        assert not any(holds(text, nouns) for text in texts), f"a held-out noun stands in a text of training: {texts}"
    for name, chosen in ("held_out", held), ("trained", training):
        records[name] = list(questions(chosen, num_evaluated, draws[name], plain=True))
        named = draws[name].sample(chosen, min(len(chosen), 160))
        records[f"{name}_names"] = [*captions([replace(item, paths=item.paths[:1]) for item in named], draws[name])]
    for name, rows in records.items():
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=0))
    # Captions keep names in mind while answers are learned: eight for five questions.
    beside = min(len(records["captions"]), 8 * num_questions // 5)
    (folder / "learned.yaml").write_text(
        "datasets:\n- {json_path: questions.json}\n"
        f'- {{json_path: captions.json, sampling_strategy: "random:{beside}"}}\n'
    )
    counts = {name: {"names": len({item.name for item in chosen}), "pictures": len(chosen)}
              for name, chosen in (("training", training), ("held_out", held))}  # fmt: skip
    return {"seed": seed, "wording": WORDING, "records": {name: len(rows) for name, rows in records.items()},
            "held_nouns": sorted(nouns), **counts}  # fmt: skip


def write_stamps(folder: Path, stamps: Mapping[str, tuple[bytes, str]], *, seed: int = 0) -> JsonObject:
    """Write a test set of photographs with a question about each, and in `names.json` with their names. `stamps`: path
    below the stamps' folder, without its ending -> a PNG, and the text beside it, whose first line says what it shows.
    Drawings and signs are left out.
    """
    chosen, pictures = [], {}
    for path, (data, text) in sorted(stamps.items()):
        folders = path.split("/")[:-1]
        match = re.match(r"(?:(?:an?|the) )?([a-z' -]+)[.,!]", text.strip().lower())
        if match and len(match[1].split()) <= 4 and not _NO_PHOTOGRAPHS & {*folders}:
            chosen.append(Item(path.replace("/", "-"), match[1], ([*folders, ""])[min(1, len(folders) - 1)]))
            pictures[chosen[-1].code] = data
    chosen = _drawn(folder, chosen, {"stamp": pictures}, seed, 0)
    draw = random.Random(seed)
    asked, named = questions(chosen, len(chosen), draw, plain=True), captions(chosen, draw)
    records = {"photographs": list(asked), "names": list(named)}
    for name, rows in records.items():
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=0))
    return {"seed": seed, "wording": WORDING, "records": {name: len(rows) for name, rows in records.items()}}
