"""Call the server from its proto alone, as a client in any language would; Coppice is not imported.

pip install grpcio-tools
python examples/raw_grpc.py [HOST:PORT]      needs a server: coppice up

When the stream breaks without a reason, the request is sent again with the tokens received so far,
the seed and the fingerprint of PromptInfo: the output goes on exactly where it stopped.
"""

# ruff: noqa: T201
from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[1] / "protos" / "coppice" / "v1"
MAX_ATTEMPTS = 5


def compile_stubs() -> tuple[Any, Any]:
    """Generate and import the stubs of generation.proto, which imports no other file."""
    out = tempfile.mkdtemp()
    options = ["protoc", f"-I{PROTOS}", f"--python_out={out}", f"--grpc_python_out={out}"]
    if protoc.main([*options, "generation.proto"]):
        raise SystemExit(f"protoc cannot compile {PROTOS / 'generation.proto'}")
    sys.path.insert(0, out)
    return importlib.import_module("generation_pb2"), importlib.import_module("generation_pb2_grpc")


def main(address: str) -> int:
    """Stream a greedy completion; resume it if the server goes away."""
    pb, pb_grpc = compile_stubs()
    request = pb.GenerateRequest(text="def read_lines(path):")
    request.stopping.max_new_tokens = 48
    token_ids: list[int] = []
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        for attempt in range(MAX_ATTEMPTS):
            try:
                for response in stub.Generate(request, timeout=120, wait_for_ready=attempt > 0):
                    match response.WhichOneof("event"):
                        case "prompt_info":
                            info = response.prompt_info
                            request.sampling.seed = info.seed
                            request.resume_fingerprint = info.model_fingerprint
                        case "delta":
                            token_ids.extend(response.delta.token_ids)
                            print(response.delta.text, end="", flush=True)
                        case "finish":
                            reason = pb.FinishReason.Name(response.finish.reason)
                            print(f"\n{reason} after {len(token_ids)} tokens")
                return 0
            except grpc.RpcError as error:
                code = error.code()  # type: ignore[attr-defined]
                if code is not grpc.StatusCode.UNAVAILABLE or not token_ids:
                    raise SystemExit(f"{code.name}: {error.details()}") from None  # type: ignore[attr-defined]
                request.resume_token_ids.ids[:] = token_ids
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"))
