"""Exported pairs that hardly learned."""

import pytest
from served_pair import build


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    build(folder, steps=2, rows=4)
    return folder


@pytest.fixture(scope="module")
def target(pair):
    return pair / "target"
