"""`memmgr gpu-check`: acts that run on a GPU which is lent for minutes, and what their figures say.

Every file runs by its path, too: an act decides itself when memmgr is imported, and some never import it.
"""
