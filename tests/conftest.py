"""One thread of arithmetic in each process of tests, so that two of them share two cores.

Exactness is promised for a fixed number of threads, and one is the fastest for tiny models.
Services that a test starts choose their threads as they do for users.
"""

from __future__ import annotations

import os

# numpy's BLAS, on which interpreted kernels run, reads it when numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(1)
