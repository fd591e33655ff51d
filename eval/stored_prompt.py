"""The one prompt that a published folder is checked with: what came of it must come again wherever it is opened."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from ..core.errors import UserError
from ..models.drafters.made_for import MANIFEST
from .published import Asked, Expected, Said, Sources, Speculator, fetch, open_published, read_published


def measure(speculator: Speculator, asked: Asked, folder: Path) -> Expected:
    """Decode the stored prompt; also plainly, which greedily must give the same tokens.

    Raises:
        UserError: the drafter changes what the target says.
    """
    found = speculator.say(asked, folder).generation
    if speculator.decoding.warp.greedy and found.tokens != speculator.say(asked, folder, plain=True).generation.tokens:
        raise UserError("with the drafter the target says something else on the stored prompt",
                        cure="do not publish this: report it, with the recipe")  # fmt: skip
    device = speculator.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Expected(
        tokens=found.tokens,
        accepted=[cycle.num_accepted for cycle in found.cycles],
        emitted=sum(cycle.num_emitted for cycle in found.cycles),
        tau=Said(None, found).tau,
        measured={"device": name, "torch": torch.__version__, "transformers": transformers.__version__},
    )


def reproduce(source: str | Path, *, target: str | Path | Sources | None = None) -> Expected:
    """Open a published folder and decode its stored prompt.

    Raises:
        UserError: it does not come out as it was published.
    """
    folder = fetch(source, None)
    speculator = open_published(folder, target=target)
    section = read_published(folder)
    if section.expected is None:
        raise UserError("no outcome is stored", where=str(folder / MANIFEST), cure="publish it again")
    found, expected = measure(speculator, section.prompt, folder), section.expected
    if found.tokens != expected.tokens or found.accepted != expected.accepted:
        raise UserError(
            f"the stored prompt has tau {found.tau:.4f} and was published with {expected.tau:.4f}"
            + ("" if found.tokens == expected.tokens else ", and its tokens differ"),
            where=str(folder / MANIFEST),
            cure=f"it was measured on {expected.measured}: in low precision another device may round otherwise; "
            "on the same one the weights or the target are not those that were published",
        )
    return found
