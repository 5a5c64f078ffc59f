"""What all folders use: the errors, and how memmgr's own threads end."""
