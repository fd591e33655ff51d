"""The one prompt that a published folder is checked with: what came of it must come again wherever it is opened."""

from __future__ import annotations

from pathlib import Path

import torch

from ..core.errors import UserError
from ..models.drafters.manifest import MANIFEST
from .published import Answer, Sources, Speculator, fetch, open_published, read_published
from .published_section import Expected, UserRequest


def measure(speculator: Speculator, asked: UserRequest, folder: Path) -> Expected:
    """Decode the stored prompt; also plainly, which greedily must give the same tokens.

    Raises:
        UserError: the drafter changes what the target says, or it says nothing, so that nothing was drafted.
    """
    import transformers

    generation = speculator.say(asked, folder).generation
    if not generation.cycles:
        raise UserError("the answer to the stored prompt ends with its first token: nothing is drafted, and nothing "
                        "can be checked", where=f"prompt {asked.text!r}",
                        hint="is the template right? Else name another prompt, or more new tokens")  # fmt: skip
    if (
        speculator.decoding.warp.greedy
        and generation.tokens != speculator.say(asked, folder, plain=True).generation.tokens
    ):
        raise UserError("with the drafter the target says something else on the stored prompt",
                        hint="do not publish this: report it, with the recipe")  # fmt: skip
    device = speculator.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Expected(
        tokens=generation.tokens,
        accepted=[cycle.num_accepted for cycle in generation.cycles],
        emitted=sum(cycle.num_emitted for cycle in generation.cycles),
        tau=Answer(None, generation).tau,
        measured={"device": name, "torch": torch.__version__, "transformers": transformers.__version__},
    )


def reproduce(
    source: str | Path, *, target: str | Path | Sources | None = None, allow_import: bool = False
) -> Expected:
    """Open a published folder and decode its stored prompt.

    Args:
        target: as of `open_published`.
        allow_import: as of `open_published`.

    Raises:
        UserError: it does not come out as it was published.
    """
    folder = fetch(source, None)
    speculator = open_published(folder, target=target, allow_import=allow_import)
    section = read_published(folder)
    if section.expected is None:
        raise UserError("no outcome is stored", where=str(folder / MANIFEST), hint="publish it again")
    result, expected = measure(speculator, section.prompt, folder), section.expected
    if result.tokens != expected.tokens or result.accepted != expected.accepted:
        raise UserError(
            f"the stored prompt has tau {result.tau:.4f} and was published with {expected.tau:.4f}"
            + ("" if result.tokens == expected.tokens else ", and its tokens differ"),
            where=str(folder / MANIFEST),
            hint=f"it was measured on {expected.measured}: in low precision another device may round otherwise; "
            "on the same one the weights or the target are not those that were published",
        )
    return result
