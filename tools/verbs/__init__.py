"""The verbs of the command line: one file each, with `add_arguments`, `run` and a docstring that is its help."""
