"""What a user calls: one file a verb, each with `add_arguments`, `run` and a docstring that is its help."""
