"""What a user's mistake ends with, in one line of a test."""

from collections.abc import Callable

import pytest
from draftsmith.core.errors import UserError


def fails_with(match: str, call: Callable, /, *args, error: type[BaseException] = UserError, **kwargs):
    """The error of this call, in whose text `match` is found ("": any text). Without an error the test fails."""
    __tracebackhide__ = True
    with pytest.raises(error, match=match or None) as caught:
        call(*args, **kwargs)
    return caught.value


def raising(error: BaseException | type[BaseException]) -> Callable:
    """A function that raises this error, whatever it is called with."""

    def raises(*_, **__):
        raise error

    return raises
