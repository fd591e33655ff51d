"""The `draftsmith` command's subcommands, one file each; `recipes/cli.py` lists them."""
