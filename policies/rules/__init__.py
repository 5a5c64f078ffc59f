"""Which cells are evicted, how, and which are prefetched: pure functions over columns of cells."""
