"""Grammars of constrained output: checked, compiled, kept; used by the HTTP process and by the scheduler (torch-free)."""
