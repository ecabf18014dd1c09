"""Generate the Python stubs of protos/ into the repository, where they are committed.

`python scripts/gen_protos.py [OUT]`; OUT defaults to the repository root. The proto's directory is
its package is its import path, so the generated imports need no fix-up.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` of every proto below `out`.

    Raises: RuntimeError if protoc refuses a proto; it has printed why.
    """
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'protos'}",
        f"--proto_path={well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *map(str, protos),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
