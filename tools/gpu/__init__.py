"""`memmgr gpu-check`: acts that run on a GPU which is lent for minutes, and the verdicts on their figures.

Every file runs by its path, too: an act decides itself when memmgr is imported, and some never import it.
"""
