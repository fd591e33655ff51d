"""The target of block drafts."""

import pytest
from tiny import llava, target


@pytest.fixture(scope="module")
def big():
    """Five layers, so that three taps are different ones."""
    return target(llava(0, layers=5))
