"""Grammars of outputs: compiled in a process of their own, matched beside the target's step."""
