"""One-query (decode) attention over paged KV.

``reference.py`` is the specification, ``triton.py`` the kernels, ``config.py`` their launch parameters. The backends in
``runner/attention*.py`` are the callers; which one runs is the flag ``--attention-backend``.
"""
