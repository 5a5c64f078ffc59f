"""Code that several verbs use: words for the terminal, rates of machines, steps on tensors without bytes, logs of other
systems.
"""
