"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """A number with its noun, which takes an s but for one: `1 shard`, `1,200 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
