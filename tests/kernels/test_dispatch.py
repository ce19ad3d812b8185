"""Which implementation an op gets, the table of them, and the pairing with ``sgl_kernel``."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken import environ, hardware
from freetoken.environ import TABLE, EnvironmentValueError
from freetoken.kernels import __main__ as command
from freetoken.kernels import dispatch, sgl
from freetoken.kernels.dispatch import Choice, choose, choose_op
from freetoken.kernels.rms_norm import RmsNorm
from freetoken.kernels.rms_norm import reference as norm_reference
from freetoken.kernels.silu_mul import SiluMul
from freetoken.kernels.silu_mul import reference as silu_reference

NORM = "FREETOKEN_FUSED_NORM"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in TABLE:
        monkeypatch.delenv(row.name, raising=False)


@pytest.fixture
def fake_sgl(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the package, installed in a version that pairs with a stand-in torch version."""
    module = types.ModuleType("sgl_kernel")

    def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        residual.add_(x)
        x.copy_(norm_reference.rms_norm(residual, weight, eps))

    module.rmsnorm = norm_reference.rms_norm
    module.fused_add_rmsnorm = fused_add_rmsnorm
    module.silu_and_mul = lambda source, out: out.copy_(silu_reference.silu_mul(source))
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    monkeypatch.setattr(sgl, "installed_version", lambda: "0.4.7")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    return module


@pytest.mark.parametrize(
    ("value", "device", "impl", "why"),
    [
        (None, "cuda", "triton", "default on CUDA"),
        ("true", "cuda", "triton", "default on CUDA"),
        ("0", "cuda", "reference", f"{NORM}=0"),
        ("check", "cuda", "check", f"{NORM}=check"),
        (None, "cpu", "reference", "no CUDA device"),
        ("check", "cpu", "reference", "no CUDA device"),
    ],
)
def test_choose(value: str | None, device: str, impl: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv(NORM, value)
    assert choose("rms_norm", NORM, device) == Choice("rms_norm", NORM, impl, why)


def test_a_bad_value_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NORM, "yes")
    with pytest.raises(EnvironmentValueError, match="FREETOKEN_FUSED_NORM='yes'"):
        choose_op("rms_norm", "cpu")


def test_table_has_a_row_for_every_kernel_flag() -> None:
    flags = [choice.flag for choice in dispatch.table("cpu")]
    assert sorted(flags) == sorted(row.name for row in TABLE if row.kind == "kernel")


@pytest.mark.parametrize(
    ("package", "torch_version", "expected"),
    [
        ("0.4.10", "2.14.1", True),
        ("0.4.10", "2.13.0", False),
        ("0.4.7", "2.13.0+cu130", True),
        ("0.4.7", "2.14.0", False),
        ("0.4.2.post2", "2.11.0", True),
        ("0.4.3", "2.11.0", True),
        ("0.4.4", "2.11.0+cu130", True),
        ("0.4.2.post1", "2.11.0", False),
        ("0.4.5", "2.11.0", False),
        ("0.3.21", "2.11.0", False),
        ("1.0", "2.14.0", False),
        ("0.4.10rc1", "2.14.0", False),
    ],
)
def test_pairs(package: str, torch_version: str, expected: bool) -> None:
    assert sgl.pairs(package, torch_version) is expected


def test_without_the_package_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgl, "installed_version", lambda: None)
    assert choose_op("rms_norm", "cuda") == Choice("rms_norm", NORM, "triton", "sgl_kernel is not installed")


def test_a_version_that_does_not_pair_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgl, "installed_version", lambda: "0.4.5")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    choice = choose_op("silu_mul", "cuda")
    assert (choice.impl, choice.why) == ("triton", "sgl_kernel 0.4.5 does not pair with torch 2.13.0")


def test_a_package_that_does_not_load_is_named(fake_sgl: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> types.ModuleType:
        raise ImportError("undefined symbol: _ZN3c10\nsecond line")

    monkeypatch.setattr(sgl, "_module", broken)
    assert choose_op("rms_norm", "cuda").why == "sgl_kernel 0.4.7 does not load: undefined symbol: _ZN3c10"


def test_a_missing_function_is_named(fake_sgl: types.ModuleType) -> None:
    del fake_sgl.fused_add_rmsnorm
    assert choose_op("rms_norm", "cuda").why == "sgl_kernel 0.4.7 lacks fused_add_rmsnorm"


def test_sgl_kernel_is_used_for_norm_and_activation(fake_sgl: types.ModuleType) -> None:
    impls = {choice.op: choice.impl for choice in dispatch.table("cuda")}
    assert impls["rms_norm"] == impls["silu_mul"] == "sgl_kernel"
    assert impls["rope_kv"] == impls["small_gemm"] == "triton"
    norm, act = RmsNorm(choose_op("rms_norm", "cuda")), SiluMul(choose_op("silu_mul", "cuda"))
    x, weight, other, gate_up = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(norm(x, weight, 1e-6), norm_reference.rms_norm(x, weight, 1e-6))
    expected = norm_reference.rms_norm(x, weight, 1e-6, other)
    for ours, theirs in zip(norm.add(x.clone(), weight, 1e-6, other.clone()), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(act(gate_up), silu_reference.silu_mul(gate_up))


def test_flags_come_before_the_package(fake_sgl: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NORM, "check")
    assert choose_op("rms_norm", "cuda").impl == "check"


def test_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Facts(0, False, 2, 1))
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(dispatch.OPS)
    assert lines[1].split()[:4] == ["rms_norm", NORM, "1", "reference"] and lines[1].endswith("no CUDA device")
    assert "sm_80 sm_86 sm_89 sm_90 sm_120" in lines[1]
    with pytest.raises(SystemExit):
        command.main(["--bogus"])
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err
    monkeypatch.setenv("FREETOKEN_BOGUS", "1")
    assert command.main([]) == 1
    assert capsys.readouterr().err.startswith("FREETOKEN_BOGUS is not a freetoken setting")
    monkeypatch.delenv("FREETOKEN_BOGUS")
    monkeypatch.setenv(NORM, "2")
    assert command.main([]) == 1
    assert capsys.readouterr().err.startswith("FREETOKEN_FUSED_NORM='2': use 1, 0 or check")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    words = f"{sys.executable} -m freetoken.kernels | head -n 0"
    path = {"PYTHONPATH": str(Path(command.__file__).parents[2])}
    done = subprocess.run(["sh", "-c", words], env=environ.for_child(path), capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_command_says_the_value_and_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NORM, "check")
    rows = {row[0]: row for row in command.rows(dispatch.table("cpu"), (9, 0))}
    assert rows["rms_norm"][2] == "check" and rows["rms_norm"][5] == "by rule"
    assert rows["small_gemm"][5] == "17 shapes measured"
    assert {row[0]: row for row in command.rows(dispatch.table("cpu"), (8, 0))}["small_gemm"][
        5
    ] == "not measured, by rule"


def test_every_op_has_kernels_in_the_committed_table() -> None:
    assert [op.name for op in dispatch.OPS if dispatch.tested(op) != "sm_80 sm_86 sm_89 sm_90 sm_120"] == []


def test_capability_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, name: str) -> None:
            self.attributes = {75: 9, 76: 0}

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 1
            return 0

        def cuDeviceGet(self, device: Any, index: int) -> int:
            return 0

        def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
            value._obj.value = self.attributes[attribute]
            return 0

    monkeypatch.setattr(hardware.ctypes, "CDLL", Driver)
    assert hardware.capability() == (9, 0) and hardware.capability(1) is None
