"""A row that lacks arguments, to see the compile tool fail."""

from compile_tool import KernelCase

CASES = [KernelCase("incomplete", "freetoken.kernels.silu_mul.triton:silu_mul_kernel", {"gate_up_ptr": "*bf16"})]
