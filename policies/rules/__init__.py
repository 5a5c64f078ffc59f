"""Who leaves, how, and who comes back early: pure functions over columns of cells."""
