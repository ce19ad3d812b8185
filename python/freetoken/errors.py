"""Errors that carry what a client or an operator needs: one sentence, a status, a code and the field at fault."""

from __future__ import annotations


class FreetokenError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` is one sentence for a person."""


class RequestError(FreetokenError):
    """A request we refuse or cannot finish.

    ``status`` is the HTTP status, ``code`` a stable machine word, ``param`` the field at fault (``None`` when no single
    field is), ``retry_after`` seconds for a 503.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after = retry_after


class StartupError(FreetokenError):
    """The start cannot go on: a bad flag, file, shape or too little memory. Printed as one sentence, exit code 1."""
