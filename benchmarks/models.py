"""The models of a benchmark, and engines over them as the workers build them."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.inflate import HEAD, TARGET, inflate_bundled, write_checkpoint
from benchmarks.inflation import SHAPES, InflatedReader
from draft_service.engine import DraftEngine
from draft_service.engine_factory import create_engine as create_draft_engine
from shared.config import QUANTIZATIONS, DraftConfig, TargetConfig
from shared.device import resolve_device
from shared.models import eagle3, llama
from shared.models.checkpoint import CheckpointReader
from shared.models.checkpoint_names import resolve_model
from target_service.engine import TargetEngine
from target_service.engine_factory import create_engine as create_target_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Directories of a target and its draft."""

    target: Path
    draft: Path

    def target_engine(self, args: argparse.Namespace, **options: Any) -> TargetEngine:
        """Build a target engine as its worker does."""
        config = TargetConfig(
            model=str(self.target),
            draft_model=str(self.draft),
            device=args.device,
            dtype=args.dtype,
            quantization=args.quantization,
            **options,
        )
        return create_target_engine(config, lambda *_: None)

    def draft_engine(self, args: argparse.Namespace, **options: Any) -> DraftEngine:
        """Build a draft engine as its worker does."""
        config = DraftConfig(
            model=str(self.draft),
            target_model=str(self.target),
            device=args.device,
            dtype=args.dtype,
            quantization=args.quantization,
            **options,
        )
        return create_draft_engine(config, lambda *_: None)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what runs, and where."""
    names = ", ".join(SHAPES)
    parser.add_argument(
        "--model",
        default="auto",
        help=f"{names} (built in memory), demo, or a directory; auto = the 8B on a GPU, else demo",
    )
    parser.add_argument("--draft-model", default="demo", help="with a directory: its draft's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto")


def resolve_flags(args: argparse.Namespace) -> torch.device:
    """Return the device; settle `--model auto`.

    Mutates: `args.model`.
    """
    device = resolve_device(args.device)
    if args.model == "auto":
        args.model = "llama-3.1-8b" if device.type == "cuda" else "demo"
    return device


@contextlib.contextmanager
def open_pair(model: str, draft_model: str = "demo") -> Iterator[Pair]:
    """Find or make a pair; checkpoints opened inside of the context may be made in memory.

    Args:
        model: A name in SHAPES, "demo", or a checkpoint directory.
        draft_model: Used with a directory only.
    """
    if model not in SHAPES:
        yield Pair(target=resolve_model(model, TARGET), draft=resolve_model(draft_model, HEAD))
        return
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        recipes = {}
        for role, checkpoint in inflate_bundled(model).items():
            write_checkpoint(checkpoint, Path(root) / role, has_data=False)
            recipes[Path(root) / role] = checkpoint.recipes

        def open_reader(directory: Path, **options: Any) -> CheckpointReader:
            if directory in recipes:
                return InflatedReader(directory, recipes[directory], **options)
            return CheckpointReader(directory, **options)

        for module in (llama, eagle3):
            stack.enter_context(mock.patch.object(module, "CheckpointReader", open_reader))
        yield Pair(target=Path(root) / TARGET, draft=Path(root) / HEAD)
