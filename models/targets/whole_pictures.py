"""What targets ask of requests whose pictures their tower reads whole (Mistral 3, Pixtral, Gemma 4)."""

from __future__ import annotations

from ...core.batch import VIDEO, Request
from ...core.errors import UserError


def check_whole(request: Request, merge: int) -> Request:
    """The request itself.

    Args:
        merge: patches along a side of what becomes one token.

    Raises:
        UserError: its pictures are cut for another family.
    """
    pictures = request.pictures
    if any(p.whole is None or p.whole.merge != merge or p.modality == VIDEO for p in pictures) or (
        request.pixels is not None and not pictures
    ):
        raise UserError(
            f"the target reads images whole, {merge} x {merge} patches a token, and these are cut for another family",
            where=request.name, hint="use its own processor for this target's requests",
        )  # fmt: skip
    return request
