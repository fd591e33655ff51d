"""The section `draftsmith` of an exported folder's `config.json`. Reading it needs neither vLLM nor torch."""

from dataclasses import dataclass, field
from typing import Any

FORMAT = 1  # of the section; another one is of another version of draftsmith
DRAFTERS = ("msd", "lvlm")


class WrongSection(ValueError):
    """The section is missing, or not what this version reads."""


@dataclass(frozen=True)
class Section:
    """What a class must know beside the config's usual keys.

    Args:
        drafter: msd or lvlm.
        fc_bias: of msd: whether fc has a bias.
        language_model: of lvlm: the draft's own Llama config; the keys around the section hold the target's width, as
            the engine's buffer of states has.
    """

    drafter: str
    fc_bias: bool = False
    language_model: dict[str, Any] = field(default_factory=dict)


def read(config: Any, drafter: str) -> Section:
    """The section of a model config.

    Args:
        drafter: that the class at hand serves.

    Raises:
        WrongSection: it is missing, of another drafter, or of another format.
    """
    written = config.get("draftsmith") if isinstance(config, dict) else getattr(config, "draftsmith", None)
    cure = "export the drafter anew: draftsmith export FOLDER OUT --to vllm"
    if not isinstance(written, dict):
        raise WrongSection(f"config.json has no section draftsmith; {cure}")
    if written.get("format") != FORMAT:
        raise WrongSection(
            f"config.json, draftsmith.format is {written.get('format')!r}, and this draftsmith-vllm reads {FORMAT}; "
            "install the one that belongs to the draftsmith that wrote it"
        )
    if written.get("drafter") != drafter:
        raise WrongSection(f"config.json, draftsmith.drafter is {written.get('drafter')!r}, not {drafter!r}; {cure}")
    known = {name: written[name] for name in ("fc_bias", "language_model") if name in written}
    unknown = sorted(set(written) - {"format", "drafter", *known})
    if unknown:
        raise WrongSection(f"config.json, draftsmith.{unknown[0]}: no such key; {cure}")
    needed = "fc_bias" if drafter == "msd" else "language_model"
    if not isinstance(known.get(needed), bool if drafter == "msd" else dict):
        raise WrongSection(f"config.json, draftsmith.{needed} is missing; {cure}")
    return Section(drafter, **known)
