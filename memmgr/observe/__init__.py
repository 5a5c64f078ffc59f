"""Observations of a run: figures, passes, the roles of tensors, the summary line, error texts, advice."""
