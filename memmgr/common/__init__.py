"""The common ground of all folders: the errors, and how memmgr's own threads end."""
