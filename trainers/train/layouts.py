"""Who reads weights outside the run that are not in our own layout."""

from __future__ import annotations

from ...models.drafters.outside import LoadPublished
from ...models.formats.heads import load_published

PUBLISHED: LoadPublished = load_published
