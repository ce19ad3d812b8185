"""Kernels as the host launches them: what kind of call was compiled to what is remembered.

Triton finds the compiled kernel of every call anew: it binds the arguments by name, specialises each, writes the options out as
text and reads its settings from the environment. A forward pass without a graph is some thousand launches, and bound by that. Here a call is told by
what Triton specialises by, and no more coarsely: type and alignment to 16 bytes of pointers; of integers whether they are 1, multiples of 16, and
their width; types of other numbers; values of compile-time constants and options; the device. Only a kind of call that is new goes through Triton.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from freetoken import environ


@functools.cache
def _on() -> bool:
    return bool(environ.get("FREETOKEN_FAST_LAUNCH"))


def launched(function: Any) -> Any:
    """Decorator above ``triton.jit`` for a kernel that the host launches; what the interpreter runs stays as it is."""
    from triton.runtime.jit import JITFunction

    return HostKernel(function) if isinstance(function, JITFunction) else function


def integer_kind(value: int) -> int:
    """What Triton may specialise by of an integer argument: whether it is 1, whether 16 divides it, and its type."""
    width = 0 if -(2**31) <= value < 2**31 else 4 if value < 2**63 else 8
    return (1 if value == 1 else 2 if value & 15 == 0 else 0) | width


class HostKernel:
    """Launches ``function``, a ``triton.JITFunction``, by the same notation, ``kernel[grid](...)``; everything else is the function's own.

    Arguments of the kernel come by position, compile-time constants and options by name: other calls, grids that are functions, and
    arguments of other types than plain tensors and numbers go through Triton every time.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._constant = [parameter.is_constexpr for parameter in function.params]
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **named: Any) -> Any:
        kind = self.kind(args, named) if _on() and type(grid) is tuple and not self.function.pre_run_hooks else None
        if kind is None:
            return self.function[grid](*args, **named)
        key = (torch.cuda.current_device(), kind)
        found = self._known.get(key)
        if found is not None:
            compiled, constants = found
            compiled[(*grid, 1, 1)[:3]](*args, *constants)
            return compiled
        compiled = self.function[grid](*args, **named)
        constants = self._constants(len(args), named)
        if compiled is not None and constants is not None:
            self._known[key] = compiled, constants
        return compiled

    def kind(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...] | None:
        """What the compiled kernel of a call depends on; ``None`` where that is for Triton to say."""
        parts: list[Any] = []
        for value in args:
            type_ = type(value)
            if type_ is torch.Tensor:
                parts += (value.dtype, value.data_ptr() & 15 == 0)
            elif type_ is int:
                parts.append(integer_kind(value))
            elif type_ is float:
                parts.append(float)
            else:
                return None
        values = tuple(named.values())
        return (tuple(parts), tuple(named), values, tuple(map(type, values)))

    def _constants(self, given: int, named: dict[str, Any]) -> tuple[Any, ...] | None:
        """Values of the parameters behind the ``given`` first, all of them constants; ``None`` where it is not so."""
        if any(self._constant[:given]) or not all(self._constant[given:]):
            return None
        rest = self.function.params[given:]
        return tuple(named.get(p.name, p.default) for p in rest)
