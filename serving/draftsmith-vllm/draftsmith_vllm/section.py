"""The section `draftsmith` of an exported folder's `config.json`. Reading it needs neither vLLM nor torch.

fc_bias: whether a head's fc has a bias. input_norm: whether its layer norms its input. language_model: of lvlm, the
draft's own Llama config; the keys around the section hold the target's width, as the engine's buffer of states has.
projector_input: tower, or projected (the target's features). newline_id: stands for each picture. num_queries: vectors
of a picture. num_held: how many of these stand in inputs; the last one joins the states.
"""

from types import SimpleNamespace
from typing import Any

FORMAT = 1  # of the section; another one is of another version of draftsmith
# Drafter -> what its section must hold.
KEYS: dict[str, dict[str, type]] = {
    "msd": {"fc_bias": bool},
    "middle": {"fc_bias": bool, "input_norm": bool},
    "lvlm": {"language_model": dict},
    "lvlm-m": {"projector_input": str},
    "lvlm-t": {"newline_id": int},
    "window": {"fc_bias": bool, "input_norm": bool},
    "vispec": {"fc_bias": bool, "input_norm": bool, "num_queries": int, "num_held": int},
}


class WrongSection(ValueError):
    """The section is missing, or not what this version reads."""


def read(config: Any, drafter: str) -> SimpleNamespace:
    """The section of a model config; `input_norm` is False where a drafter has no such key. `drafter`: that the class
    at hand serves. Raises `WrongSection`: it is missing, of another drafter, or of another format.
    """
    written, wanted = _written(config), KEYS[drafter]
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
    if unknown := sorted(set(written) - {"format", "drafter", *wanted}):
        raise WrongSection(f"config.json, draftsmith.{unknown[0]}: no such key; {cure}")
    for name, kind in wanted.items():
        if not isinstance(written.get(name), kind):
            raise WrongSection(f"config.json, draftsmith.{name} is missing; {cure}")
    return SimpleNamespace(**{"input_norm": False} | {name: written[name] for name in wanted})


def reads_tower(config: Any) -> bool:
    """Whether a draft's config says that its projector reads the target's tower."""
    written = _written(config)
    return isinstance(written, dict) and written.get("projector_input") == "tower"


def _written(config: Any) -> Any:
    return config.get("draftsmith") if isinstance(config, dict) else getattr(config, "draftsmith", None)
