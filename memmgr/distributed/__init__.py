"""The ranks of a distributed job: each learns through the process group's store that another one is in trouble."""
