"""Compile the kernels that norm rows, without their FP8 and with it; see compile_kernels.py.

As a program, check for a capability that rows in FP8 do not change in which order a GPU adds the
squares of a row, which Triton chooses by how threads load and store: a norm must leave the same
bits with them.
"""

from __future__ import annotations

import re
import sys

import triton

from shared.kernels import head_input, rms_norm

# How rows are left in FP8: not at all, as bytes, or as e4m3.
FORMS = ("", "*u8", "*fp8e4nv")


def norm_kernels(dtype: str, forms=FORMS, widths=(1000, 4096)):
    """Yield kernel, types of its arguments (values in `dtype`), constexprs and maybe options."""
    values = f"*{dtype}"
    for form in forms[:1] if dtype == "fp32" else forms:
        ends = [form, "*fp32"] if form else [values] * 2
        for width in widths:
            shape = {"HAS_FP8": bool(form), "WIDTH": width}
            shape["BLOCK"] = triton.next_power_of_2(width)
            yield head_input._head_input_kernel, ["*i64", *[values] * 5, *ends, "fp32"], shape
            for is_centered in (False, True):
                norm = {"IS_CENTERED": is_centered, **shape}
                yield rms_norm._rms_norm_kernel, [*[values] * 3, *ends, "fp32"], norm
            for weights, norms_delta, norms_sum in (
                (values, False, True),
                ("*fp32", True, True),
                ("*fp32", False, True),
                (values, True, False),
            ):
                yield (
                    rms_norm._add_rms_norm_kernel,
                    [values, "*fp32", values, weights, weights, values, values]
                    + [*ends, "i32", "fp32"],
                    {"IS_CENTERED": weights == "*fp32" and not norms_delta, "HAS_BIAS": True}
                    | {"NORMS_DELTA": norms_delta, "NORMS_SUM": norms_sum}
                    | {"NUM_SPLITS": 4, **shape},
                    {"num_warps": 8 if width > 2048 else 4},
                )


def orders_of_sums(ttgir: str) -> list[str]:
    """Return how the values of each sum over a row are dealt out to threads."""
    layouts = dict(re.findall(r"(#blocked\d*) = (#ttg\.blocked<.*>)", ttgir))
    sums = re.split(r'= "tt\.reduce"', ttgir)[1:]
    ends = [
        re.search(r"(arith\.\w+).*?: \(tensor<[^#]*(#blocked\d*)>\)", end, re.S) for end in sums
    ]
    return [layouts[end[2]] for end in ends if end[1] == "arith.addf"]


def main() -> None:
    """Compare the kernels of all forms, for the capability on the command line."""
    from tests.kernels.compile_kernels import compile_kernel

    capability = int(sys.argv[1])
    for width in (1536, 3000, 4096):
        orders = []
        for form in FORMS:
            cases = norm_kernels("bf16", (form,), (width,))
            binaries = [compile_kernel(*case[:3], capability, *case[3:]) for case in cases]
            orders.append([orders_of_sums(binary.asm["ttgir"]) for binary in binaries])
        assert all(orders[0]), "no sums were found"
        assert orders == orders[:1] * len(FORMS), f"{width}: {orders}"
        sys.stdout.write(f"{width} {sum(map(len, orders[0]))}\n")


if __name__ == "__main__":
    main()
