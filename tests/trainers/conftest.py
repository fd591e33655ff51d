"""What the tests of this folder share."""

import io

import pytest
from matplotlib.figure import Figure
from PIL import Image
from states_run import synthetic


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A synthetic dataset and its target."""
    return synthetic(tmp_path_factory.mktemp("world"))


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are files of one dot: drawing them is half of the time of a small evaluation that is run again. Those of
    module fixtures, which are made before, are drawn.
    """
    dot = io.BytesIO()
    Image.new("RGB", (1, 1)).save(dot, "png")
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **how: path.write_bytes(dot.getvalue()))
