"""Runs policies and plans over a trace, on a made-up device."""
