"""The command line in this process."""

from draftsmith.recipes.commands.cli import main


def prints(captured, words: list[str], code: int = 0) -> str:
    """What `draftsmith WORDS` prints where it must end with `code`: to stdout, or else to stderr.

    Args:
        captured: capsys or capfd.
    """
    assert main(words) == code
    streams = captured.readouterr()
    return streams.err if code else streams.out
