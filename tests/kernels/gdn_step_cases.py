"""The convolution and the decode step of Gated DeltaNet at the shapes of Qwen3.5-27B (16 key heads, 48 value heads of 128)."""

from __future__ import annotations

from dataclasses import replace

from compile_tool import KernelCase, main_case

from freetoken.kernels.gdn_conv.config import ConvConfig, pick_decode, pick_prefill
from freetoken.kernels.gdn_decode.config import DecodeConfig, pick_config
from freetoken.kernels.gdn_decode.triton import ROW_AXIS
from freetoken.kernels.integers import next_power_of_two

CONV, DECODE = "freetoken.kernels.gdn_conv.triton", "freetoken.kernels.gdn_decode.triton"
KEY_HEADS, HEADS, WIDTH, PART = 16, 48, 128, 32
CHANNELS = (2 * KEY_HEADS + HEADS) * WIDTH


def _conv_types(element: str) -> dict[str, str]:
    return {
        **dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "state_ptr", "out_ptr"), f"*{element}"),
        **dict.fromkeys(("q_starts_ptr", "starts_ptr"), "*i32"),
        **dict.fromkeys(("slots_ptr", "positions_ptr"), "*i64"),
        **dict.fromkeys(("pieces", "x_stride", "slot_stride", "tap_stride"), "i32"),
    }


def _prefill(element: str, width: int, config: ConvConfig, channels: int = CHANNELS) -> KernelCase:
    values = {"channel_stride": 1, "C": channels, "W": width, "BLOCK_T": config.block_t, "BLOCK_C": config.block_c}
    return KernelCase(
        f"gdn conv prefill {element} {channels} width {width} {config}",
        f"{CONV}:conv_prefill_kernel",
        _conv_types(element),
        {**values, "SEARCH_": 64, "HAS_BIAS": width < 4, "ON_GPU": True, "EARLY": False},
        {"num_warps": config.num_warps, "num_stages": 1},
        divisible=("x_stride", "slot_stride", "tap_stride"),
    )


def _conv_decode(config: ConvConfig) -> KernelCase:
    values = {
        "channel_stride": 1,
        "C": CHANNELS,
        "W": 4,
        "BLOCK_C": config.block_c,
        "HAS_BIAS": False,
        "ON_GPU": True,
        "EARLY": False,
    }
    return KernelCase(
        f"gdn conv decode {config}",
        f"{CONV}:conv_decode_kernel",
        _conv_types("bf16"),
        values,
        {"num_warps": config.num_warps},
        divisible=("x_stride", "slot_stride", "tap_stride"),
    )


def _step(element: str, config: DecodeConfig, dk: int = WIDTH, dv: int = WIDTH) -> KernelCase:
    names = ("qkv_ptr", "z_ptr", "a_ptr", "b_ptr", "weight_ptr", "norm_ptr", "conv_ptr", "out_ptr")
    strides = ("qkv_stride", "z_stride", "a_stride", "b_stride", "conv_stride", "rec_stride", "tap_stride")
    types = {
        **dict.fromkeys(names, f"*{element}"),
        **dict.fromkeys(("a_log_ptr", "dt_bias_ptr", "rec_ptr", "parts_ptr"), "*fp32"),
        **dict.fromkeys(("slots_ptr", "positions_ptr"), "*i64"),
        **dict.fromkeys(strides, "i32"),
        "arrivals_ptr": "*i32",
        "eps": "fp32",
    }
    width = next_power_of_two(dk)
    values = {"K_HEADS": KEY_HEADS, "V_HEADS": HEADS, "DK": dk, "DV": dv, "W": 4, "BLOCK_V": config.block_v}
    values |= {
        "HEAD_V": next_power_of_two(dv),
        "PARTS": max(1, width // PART),
        "PART": min(PART, width),
        "ROW_AXIS": ROW_AXIS,
    }
    values |= {
        "SPLITS": config.splits(dv),
        "LANES": 32 * config.num_warps,
        "PREFETCH": False,
        "SETTLED": False,
        "SIGMOID": False,
        "ON_GPU": True,
        "EARLY": False,
    }
    return KernelCase(
        f"gdn decode {element} {dk}/{dv} {config}",
        f"{DECODE}:gdn_decode_kernel",
        types,
        {**values, "channel_stride": 1},
        {"num_warps": config.num_warps, "enable_fp_fusion": True},
        divisible=strides,
    )


def _early(case: KernelCase, **values: bool) -> KernelCase:
    """The same kernel for programmatic dependent launch."""
    constexprs, options = {**case.constexprs, "EARLY": True, **values}, {**case.options, "launch_pdl": True}
    suffix = " ".join(["early", *(key.lower() for key in values)])
    return replace(case, name=f"{case.name} {suffix}", constexprs=constexprs, options=options, first_arch=90)


LONG, SHORT = pick_prefill(CHANNELS, 8192), pick_prefill(CHANNELS, 3)
WHOLE = pick_config(WIDTH, WIDTH)
CASES = [
    _prefill("bf16", 4, LONG),
    _prefill("bf16", 2, SHORT),
    _prefill("fp32", 3, LONG),
    _prefill("bf16", 4, LONG, channels=10100),
    _early(_prefill("bf16", 4, LONG)),
    _conv_decode(pick_decode(CHANNELS, 1)),
    _conv_decode(pick_decode(CHANNELS, 64)),
    main_case(_step("bf16", WHOLE)),
    _step("fp32", WHOLE),
    _step("bf16", DecodeConfig(32, 4)),
    _step("bf16", DecodeConfig(16, 1)),
    _step("fp16", pick_config(96, 80), 80, 96),
    _step("bf16", pick_config(256, 256), 256, 256),
    _early(_step("bf16", WHOLE), PREFETCH=True),
    _early(_step("bf16", DecodeConfig(32, 4)), PREFETCH=True),
    _early(_step("bf16", WHOLE), SETTLED=True),
    _early(_step("bf16", pick_config(WIDTH, WIDTH, 8 * HEADS)), SETTLED=True),
]
