"""The `draftsmith` command's subcommands, one file each; `recipes/commands/cli.py` lists them."""
