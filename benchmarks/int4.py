"""Weights in int4 against bfloat16: every product of a layer, and whole steps of the model.

What benchmarks/fp8.py measures of FP8, with the same checks and flags: values rounded to groups of
128, without zeros (`group`, as GPTQ's symmetric files) and with (`zeros`, as AWQ's). Tiles to try
have K = 512.

    python -m benchmarks.int4 --output benchmarks/results/int4.json
    python -m benchmarks.int4 --parts products --rows 1,8 --tiles 64/16/512/4/4,128/16/512/8/3
"""

from __future__ import annotations

from benchmarks import fp8


def main() -> None:
    """Measure what the flags ask for."""
    fp8.main(__doc__, "group,zeros")


if __name__ == "__main__":
    main()
