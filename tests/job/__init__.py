"""Distributed jobs as a whole: ranks in trouble, launchers, every way to be parallel."""
