"""draftsmith: train and measure drafters for speculative decoding of multimodal models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .eval.check_drafter import check_drafter as check_drafter

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`check_drafter` brings torch: it is imported when it is asked for."""
    if name != "check_drafter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .eval.check_drafter import check_drafter

    return check_drafter
