"""Causal attention of ragged prompts (prefill) over paged KV.

``reference.py`` is the specification, ``triton.py`` the kernel, ``config.py`` its launch parameters. The backends in
``runner/attention*.py`` are the callers; which one runs is the flag ``--attention-backend``.
"""
