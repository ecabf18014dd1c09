"""The `coppice` command: one file per subcommand, each with `add_parser` and `run`."""
