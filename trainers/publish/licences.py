"""Whose terms a drafter carries: its target's, its initial weights', its data's. What restricts is warned of.

The table names what the publishers' own pages said when it was written, by whole names: what it does not know it says,
and never guesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


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
_LLAMA31 = Licence(
    "llama3.1", "Llama 3.1 Community License: its use policy, and 'Llama' at the beginning of a derived model's name",
    "https://www.llama.com/llama3_1/license/",
)  # fmt: skip
_LLAMA32 = Licence(
    "llama3.2", "Llama 3.2 Community License: its use policy, and 'Llama' at the beginning of a derived model's name",
    "https://www.llama.com/llama3_2/license/",
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
    (r"JackFram/llama-68m|weights/smollm2|HuggingFaceTB/SmolLM2-.*", _APACHE),
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
    for pattern, licence in _KNOWN:
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return licence
    return Licence(None)


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
