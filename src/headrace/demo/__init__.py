"""``headrace demo``: the main job on real photographs, before and after the advice."""

from headrace.demo.story import main

__all__ = ["main"]
