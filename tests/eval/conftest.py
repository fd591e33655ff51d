"""Models of most tests of the decoding loop."""

import pytest
from tiny import llava, near


@pytest.fixture(scope="module")
def big():
    """The target."""
    return llava(0)


@pytest.fixture(scope="module", name="near")
def near_draft(big):
    """A draft that agrees with it now and then."""
    return near(big)
