"""Which class reads a `train` stage: its target and drafter say what it trains on.

pydantic parses a stage by itself and shows a discriminator that section alone, while the choice needs the recipe's
target and drafter. So the recipe, which has parsed these two, asks `chosen` for each section before the union sees it:
the way stands on the section (`Chosen`), where the discriminator reads it, and no key of it is added or written out.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Tag, ValidationError

from ...core.errors import Refused
from ...core.json_types import JsonObject
from ...models.drafters import DRAFTER
from ...models.drafters.base import DrafterConfig
from ...models.targets.table import AnyTarget
from .train import Chosen
from .train_codes import TrainCodes
from .train_records import TrainRecords
from .train_states import TrainStates

AnyTrain = Annotated[
    Annotated[TrainRecords, Tag("records")]
    | Annotated[TrainStates, Tag("states")]
    | Annotated[TrainCodes, Tag("codes")],
    Discriminator(lambda section: getattr(section, "way", None)),
]
_KEYS = {
    section.way: {field.alias or name for name, field in section.model_fields.items()}
    for section in (TrainRecords, TrainStates, TrainCodes)
}


def chosen(section: JsonObject, target: AnyTarget, drafter: DrafterConfig | None, context: object = None) -> Chosen:
    """The section with what it trains on.

    Args:
        target: the recipe's section.
        context: of pydantic's validation.

    Raises:
        Refused: nothing trains this model.
    """
    result = Chosen(section)
    result.way = _trains_on(section, target, drafter, context)
    result.foreign = frozenset[str]().union(*_KEYS.values()) - _KEYS[result.way]
    return result


def _trains_on(section: JsonObject, target: AnyTarget, drafter: DrafterConfig | None, context: object) -> str:
    model, own = section.get("model", "drafter"), section.get("drafter")
    if model == "captioner" and not target.draws_images and (drafter is None or drafter.trains_on != "records"):
        raise Refused("model", "'captioner' is no model here: it is built as a draft LVLM is", "leave it out")
    if model != "drafter":
        return "codes" if target.draws_images else "records"
    if own is not None:
        try:
            drafter = DRAFTER.validate_python(own, context=context)
        except ValidationError:  # the stage's own validation says what is wrong with it, and where
            return "codes" if target.draws_images else "states"
    if drafter is None or drafter.trains_on is None:
        what = "names none" if drafter is None else f"is of kind {drafter.kind}, which is not trained"
        raise Refused("model", f"a drafter is trained and the recipe {what}", "name one")
    return "codes" if target.draws_images else drafter.trains_on
