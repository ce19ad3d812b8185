"""Captures on disk: a folder with a description and one safetensors file a step, and the values of calls made from them again.

Parameters are not in it. They are those of the same model, loaded anew; :func:`fingerprint` tells whether it is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from freetoken import __version__
from freetoken.bench.recorder import Call, Node, parameters_of, placed
from freetoken.errors import StartupError

FORMAT = 1
DESCRIPTION = "capture.json"
SAMPLED = 64
"""Elements of each weight that the fingerprint looks at."""

Fetch = Callable[[str, str], torch.Tensor]
"""A recorded output by the name of its call and its path."""


def _plain(value: Any) -> Any:
    """What JSON lacks, the same in every process: a set has no order of its own."""
    return (
        sorted(value)
        if isinstance(value, (set, frozenset))
        else value.hex()
        if isinstance(value, bytes)
        else str(value)
    )


def describe(model: Any) -> str:
    """A model's configuration as text, without the name it goes by."""
    return json.dumps(dataclasses.asdict(model) | {"name": ""}, sort_keys=True, default=_plain)


def fingerprint(runner: Any) -> dict[str, str]:
    """Package version, a hash of the model's configuration, its type, and a hash of some elements of every weight."""
    described = describe(runner.config.model)
    weights = hashlib.sha256()
    for name, tensor in parameters_of(runner.model).items():
        step = max(1, tensor.numel() // SAMPLED)
        flat = tensor.detach().reshape(-1)[::step][:SAMPLED].contiguous().cpu()
        weights.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        weights.update(flat.view(torch.uint8).numpy().tobytes())
    return {
        "version": __version__,
        "model": hashlib.sha256(described.encode()).hexdigest(),
        "dtype": str(runner.config.dtype),
        "weights": weights.hexdigest(),
    }


def require_same(path: Path, recorded: Mapping[str, str], present: Mapping[str, str]) -> None:
    """:class:`StartupError` that names the first thing in which the loaded model is not the captured one."""
    what = {
        "version": "another version of freetoken ({a}, this is {b})",
        "model": "a model of another configuration",
        "dtype": "a model in {a}, not {b}",
        "weights": "a model with other weights",
    }
    for key, text in what.items():
        if recorded.get(key) != present[key]:
            said = text.format(a=recorded.get(key), b=present[key])
            raise StartupError(f"{path} was captured from {said}; capture anew")


class Writer:
    """Writes a capture beside its place and moves it there at the end, so that nothing half-written is left.

    :class:`StartupError` when ``path`` exists already.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise StartupError(f"{path} exists already; name another place for the capture")
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._calls: list[dict[str, Any]] = []

    def __enter__(self) -> Writer:
        try:
            shutil.rmtree(self._part, ignore_errors=True)
            self._part.mkdir(parents=True)
        except OSError as error:
            raise StartupError(f"cannot write a capture to {self._path}: {error.strerror}") from None
        return self

    def step(self, calls: Iterable[Call]) -> None:
        """Add the calls of one step."""
        tensors: dict[str, torch.Tensor] = {}
        for call in calls:
            tensors |= {f"{call.name}|{path}": tensor for path, tensor in call.tensors.items()}
            self._calls.append({**call.public(), "file": f"{call.step}.safetensors"})
        if tensors:
            save_file(tensors, self._part / f"{self._calls[-1]['step']}.safetensors")

    def finish(self, facts: Mapping[str, Any]) -> int:
        """Write the description with ``facts``; returns the number of calls. :class:`StartupError` where there was none."""
        if not self._calls:
            raise StartupError("the run made no call of these ops in these layers: nothing is recorded")
        text = json.dumps({"format": FORMAT, **facts, "calls": self._calls})
        (self._part / DESCRIPTION).write_text(text, encoding="utf-8")
        self._part.rename(self._path)
        return len(self._calls)

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._part, ignore_errors=True)


class Capture:
    """A capture that was read: ``facts`` beside the calls, ``calls`` with their tensors read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.facts: dict[str, Any] = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
            if self.facts["format"] != FORMAT:
                raise StartupError(f"{path} is a capture of another form; capture anew")
            described = [dict(item) for item in self.facts.pop("calls")]
            self._files = {item["name"]: item.pop("file") for item in described}
            self.calls = [Call(**item) for item in described]
        except OSError as error:
            raise StartupError(f"{path} is no capture: {error.strerror}: {DESCRIPTION}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StartupError(f"{path} is no capture: {DESCRIPTION} does not describe one") from None
        self._by_name = {call.name: call for call in self.calls}
        self._keys: dict[str, dict[str, list[str]]] = {}

    def fill(self, call: Call) -> Call:
        """Read the call's tensors, if they are not there."""
        if call.tensors:
            return call
        file = self._files[call.name]
        try:
            with safe_open(self.path / file, "pt") as opened:
                if file not in self._keys:
                    self._keys[file] = _by_call(opened.keys())
                call.tensors = {
                    path: opened.get_tensor(f"{call.name}|{path}") for path in self._keys[file].get(call.name, ())
                }
        except (OSError, SafetensorError) as error:
            raise StartupError(f"{self.path}: {file} cannot be read: {error}") from None
        return call

    def forget(self) -> None:
        """Let go of all tensors that were read."""
        for call in self.calls:
            call.tensors = {}

    def output(self, name: str, path: str) -> torch.Tensor:
        """A recorded output on the CPU, with the strides it had; :class:`StartupError` where the capture has none of the name."""
        found = self._by_name.get(name)
        node = None if found is None else node_at(found.output, path)
        if found is None or node is None:
            raise StartupError(f"{self.path}: no output {path} of {name}")
        tensor = self.fill(found).tensors.get(path)
        if tensor is None:
            raise StartupError(f"{self.path}: no output {path} of {name} is stored")
        return placed(tensor, node, torch.device("cpu"))


def _by_call(keys: Iterable[str]) -> dict[str, list[str]]:
    """Paths of the stored tensors by the name of their call."""
    found: dict[str, list[str]] = {}
    for key in keys:
        name, _, path = key.partition("|")
        found.setdefault(name, []).append(path)
    return found


def node_at(output: Node, path: str) -> Node | None:
    """The node of an output by its path, ``out`` or ``out.0``."""
    node: Node | None = output
    for part in path.split(".")[1:]:
        if node is None:
            return None
        parts = dict(enumerate(node["s"])) if "s" in node else node.get("f", {})
        node = parts.get(int(part) if "s" in node else part)
    return node


def decode(call: Call, node: Node, device: torch.device, parameters: Mapping[str, torch.Tensor], fetch: Fetch) -> Any:
    """The value of ``node`` on ``device``, tensors new ones (parameters excepted); ``fetch`` gives outputs that inputs are linked to."""
    if "t" in node:
        if node["t"] not in call.tensors:
            raise StartupError(f"{call.name}: the capture holds no tensor {node['t']} of it")
        return placed(call.tensors[node["t"]], node, device)
    if "p" in node:
        weight = parameters.get(node["p"])
        if weight is None:
            raise StartupError(f"{call.name}: the model has no parameter {node['p']}")
        return weight.as_strided(node["shape"], node["stride"], node["offset"])
    if "l" in node:
        output = fetch(node["l"], node["path"])
        part = output.as_strided(node["shape"], node["stride"], output.storage_offset() + node["offset"])
        # One's own, since a call may change its inputs.
        return placed(part.contiguous(), node, device)
    if "d" in node:
        return getattr(torch, node["d"])
    if "s" in node:
        items = [decode(call, item, device, parameters, fetch) for item in node["s"]]
        return items if node["k"] == "list" else tuple(items)
    if "c" in node:
        module, _, name = node["c"].partition(":")
        if not module.startswith("freetoken."):
            raise StartupError(f"{call.name}: {node['c']} is no class of freetoken")
        fields = {key: decode(call, item, device, parameters, fetch) for key, item in node["f"].items()}
        return getattr(importlib.import_module(module), name)(**fields)
    return node["v"]
