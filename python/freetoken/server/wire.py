"""What all wire formats share: the error envelope, and reading a JSON body field by field (torch-free)."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from freetoken.errors import RequestError
from freetoken.sampling_params import SamplingParams
from freetoken.server_args import Config

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
_MAX_WARNED = 256
MAX_PRIORITY = 2**31 - 1
_warned: set[tuple[str, str]] = set()


def error_object(error: RequestError) -> dict[str, Any]:
    """OpenAI's envelope."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object from a request body; :class:`RequestError` 400 for anything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return value


def parse_large_object(data: bytes) -> dict[str, Any]:
    """:func:`parse_object` for a thread, of a body of megabytes. The parser does not let go of the interpreter, so what it
    costs everybody is cut to a part: the garbage collector would look at millions of new objects again and again."""
    gc.disable()
    try:
        return parse_object(data)
    finally:
        gc.enable()


def warn_unknown(body: Mapping[str, Any], known: Collection[str], endpoint: str) -> None:
    """A warning in the log when ``endpoint`` is sent fields outside its protocol that it was not sent before: how many.

    Their names are what a client wrote, so they are for the debug level. The set of names is bounded.
    """
    new = [name for name in body if name not in known and (endpoint, name) not in _warned]
    new = new[: _MAX_WARNED - len(_warned)]
    if not new:
        return
    _warned.update((endpoint, name) for name in new)
    log.warning("%s: unknown request fields are ignored: %d new (names at --log-level debug)", endpoint, len(new))
    for name in new:
        log.debug("%s: request field %r is not known and is ignored", endpoint, name[:100])


def refuse_unserved(body: Mapping[str, Any], unserved: Mapping[str, tuple[Any, ...]]) -> None:
    """:class:`RequestError` for a field the protocol defines and we do not serve, unless its value says nothing.

    ``unserved`` maps a name to its neutral values; null is always neutral.
    """
    for name, neutral in unserved.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(item) and value == item for item in neutral):
            raise RequestError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")


def _place(name: str, where: str) -> str:
    return f"{where}.{name}" if where else name


def boolean(body: Mapping[str, Any], name: str, default: bool, where: str = "") -> bool:
    """A boolean field; null and absence give ``default``. Errors name it as a part of ``where``."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{_place(name, where)} must be a boolean", param=_place(name, where))
    return value


def integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """An integer field within ``[low, high]``; null and absence give ``None``."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and abs(value) >= 2**63:  # an integer too large for the JSON reader
        raise RequestError(f"{name} is out of range: it must be between {low} and {high}", param=name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, not {value}", param=name)
    return value


def string(body: Mapping[str, Any], name: str, where: str = "") -> str | None:
    """A string field; null and absence give ``None``. Errors name it as a part of ``where``."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{_place(name, where)} must be a string", param=_place(name, where))
    return value


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object field; null and absence give an empty one."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object", param=name)
    return value


def read_priority(body: Mapping[str, Any], config: Config) -> int:
    """``priority``: higher goes first; refused, unless it is 0, where the server does not schedule by it."""
    priority = integer(body, "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0
    if priority and not config.priority_scheduling:
        raise RequestError(
            "priority needs a server started with --enable-priority-scheduling",
            param="priority",
            code="unsupported_parameter",
        )
    return priority


def token_ids(value: Any, param: str) -> list[int]:
    """A list of non-negative integers, checked."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise RequestError(f"{param} must be a list of token ids", param=param)
    if value and not 0 <= min(value) <= max(value) < 2**31:
        raise RequestError(f"{param} holds a token id that is out of range", param=param)
    return value


def check_model(body: Mapping[str, Any], served: str) -> None:
    """404 unless ``model`` is absent or names the served model."""
    name = string(body, "model")
    if name is not None and name != served:
        raise RequestError(
            f"the model {name[:200]!r} does not exist; this server serves {served!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


@dataclass
class StreamOptions:
    """``stream``, and ``stream_options.include_usage`` (usage in a last event of its own)."""

    stream: bool = False
    include_usage: bool = False

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> StreamOptions:
        stream, options = boolean(body, "stream", False), mapping(body, "stream_options")
        if options and not stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        refuse_unserved(options, {"continuous_usage_stats": (False,)})
        return cls(stream, boolean(options, "include_usage", False))


SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "seed": "seed",
    "n": "n",
    "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim",
}


@dataclass
class SamplingReader:
    """Collects sampling values and the client's spelling of each, so that an error names what the client wrote."""

    defaults: Mapping[str, float]
    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)

    def read(self, body: Mapping[str, Any], fields: Mapping[str, str] = SAMPLING_FIELDS) -> None:
        """Take all of ``fields`` (client's name -> ours) that ``body`` has; null counts as absent."""
        for name, ours in fields.items():
            if body.get(name) is not None:
                self.set(ours, body[name], name)

    def set(self, ours: str, value: Any, spelled: str) -> None:
        self.values[ours] = value
        self.spelled[ours] = spelled

    def build(self) -> SamplingParams:
        """:class:`RequestError` naming the field as the client spelled it. Unset fields take the model's defaults."""
        values = {name: value for name, value in self.defaults.items() if name in SamplingParams.__struct_fields__}
        if isinstance(values.get("top_k"), float):
            values["top_k"] = int(values["top_k"])
        values.update(self.values)
        try:
            return SamplingParams.from_dict(values)
        except RequestError as error:
            message = error.message
            for ours, spelled in self.spelled.items():
                if ours != spelled:
                    message = re.sub(rf"\b{ours}\b", spelled, message)
            param = self.spelled.get(error.param or "", error.param)
            raise RequestError(message, param=param, code=error.code, status=error.status) from None
