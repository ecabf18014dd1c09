"""The identity of a model's weights: a digest of every byte, kept between starts.

A digest takes a second per gigabyte and core, so it is computed in threads while the weights load
(`start_model_hash`), and remembered in a cache directory of the user: never inside the checkpoint,
which may be read-only or shared. A remembered digest holds for one size and time of every file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CheckpointError
from shared.models.pickled import PickledFile
from shared.models.tensor_files import TensorInfo, read_tensor_infos

logger = logging.getLogger(__name__)

_VERSION = 1
# All cores of a small machine, a quarter of those of a large one: they load weights meanwhile.
_FEW_THREADS, _MAX_THREADS = 8, 16
# hashlib and readinto let other threads run; per thread.
_BLOCK_BYTES = 4 << 20
# A file that changes again this soon may keep its time: file systems count in steps up to 2 s.
SETTLE_S = 2.0


def model_hash(directory: Path, cache: HashCache | None = None) -> str:
    """Return the identity of a checkpoint: SHA-256 over its config and every byte of its tensors.

    Covers config.json and each tensor's name, shape, dtype and contents, in order of names: the
    same for any sharding, and for safetensors and pytorch_model.bin.

    Args:
        cache: Where digests are remembered; None: in the user's cache directory.
    Raises: CheckpointError naming a file that is missing or broken.
    """
    cache = cache or HashCache(default_cache_dir())
    infos = read_tensor_infos(directory)
    files = sorted({directory / "config.json", *(info.file for info in infos.values())})
    state = _state_of(files)
    known = cache.find(directory, state)
    if known is not None:
        return known
    started = time.monotonic()
    digest = _compute(directory / "config.json", infos)
    if _state_of(files) == state:  # else it was written while it was read
        cache.remember(directory, state, digest)
    logger.info("hashed the weights of %s in %.1f s", directory, time.monotonic() - started)
    return digest


def start_model_hash(directory: Path) -> Callable[[], str]:
    """Begin to compute `model_hash` beside other work; return a function that waits for it.

    The function raises what `model_hash` raises.
    """
    result: list[str | Exception] = []

    def compute() -> None:
        try:
            result.append(model_hash(directory))
        except Exception as error:  # handed over to the thread that waits
            result.append(error)

    # A daemon: a start that fails for another reason does not wait for it.
    thread = threading.Thread(target=compute, name="model-hash", daemon=True)
    thread.start()

    def wait() -> str:
        thread.join()
        outcome = result[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return wait


def default_cache_dir() -> Path:
    """Return where digests are remembered: $XDG_CACHE_HOME/coppice, or ~/.cache/coppice."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "coppice"


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes with the contents of a file; times in nanoseconds."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class HashCache:
    """Digests of checkpoints by the state of their files; one small JSON file per checkpoint.

    A cache that cannot be read or written is as good as an empty one.

    Args:
        directory: Made when it is needed.
        settle_s: Files that changed less than this many seconds ago are not remembered.
    """

    def __init__(self, directory: Path, *, settle_s: float = SETTLE_S) -> None:
        self._directory = directory
        self._settle_s = settle_s

    def find(self, checkpoint: Path, state: list[FileState]) -> str | None:
        """Return the digest of a checkpoint whose files are in this state, if it is known."""
        try:
            entry = json.loads(self._path(checkpoint).read_text())
            digest = entry["model_hash"]
            is_known = entry["version"] == _VERSION and entry["files"] == _as_json(state)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return digest if is_known and isinstance(digest, str) else None

    def remember(self, checkpoint: Path, state: list[FileState], digest: str) -> None:
        """Note the digest of a checkpoint whose files are in this state."""
        newest_ns = max(max(file.mtime_ns, file.ctime_ns) for file in state)
        if time.time() - newest_ns / 1e9 < self._settle_s:
            return
        entry = {"version": _VERSION, "files": _as_json(state), "model_hash": digest}
        path = self._path(checkpoint)
        try:
            _write_whole(path, json.dumps(entry))
        except OSError as error:
            logger.info("the digest of %s is not remembered: %s", checkpoint, error)

    def _path(self, checkpoint: Path) -> Path:
        name = hashlib.sha256(str(checkpoint.resolve()).encode()).hexdigest()[:32]
        return self._directory / "model-hashes" / f"{name}.json"


def _write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: others may read it now, and the disk may be full.

    Raises: OSError; nothing is left of what could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _as_json(state: list[FileState]) -> list[list[str | int]]:
    return [[f.path, f.size, f.mtime_ns, f.ctime_ns, f.inode] for f in state]


def _state_of(files: list[Path]) -> list[FileState]:
    state = []
    for file in files:
        stat = file.stat()
        state.append(
            FileState(
                path=file.name,
                size=stat.st_size,
                mtime_ns=stat.st_mtime_ns,
                ctime_ns=stat.st_ctime_ns,
                inode=stat.st_ino,
            )
        )
    return state


def _compute(config: Path, infos: Mapping[str, TensorInfo]) -> str:
    digest = hashlib.sha256(config.read_bytes())
    names = sorted(infos)
    num_cores = len(os.sched_getaffinity(0))
    num_threads = max(min(num_cores, _FEW_THREADS), min(num_cores // 4, _MAX_THREADS))
    files = {info.file for info in infos.values() if info.is_pickled}
    pickles = {file: PickledFile(file) for file in files}
    contents: dict[str, str] = {}
    left = iter(names)

    def compute_some() -> None:
        # No task or memory for each tensor: making it would stop the Python that loads beside it.
        block = memoryview(bytearray(_BLOCK_BYTES))
        try:
            for name in left:
                info = infos[name]
                if info.is_pickled:
                    data = pickles[info.file].bytes_of(name)
                    contents[name] = hashlib.sha256(data).hexdigest()
                else:
                    contents[name] = _digest_of(info, block)
        except BaseException:
            list(left)  # nobody takes another one
            raise

    with ThreadPoolExecutor(num_threads, thread_name_prefix="model-hash") as pool:
        tasks = [pool.submit(compute_some) for _ in range(num_threads)]
    for task in tasks:
        task.result()
    for name in names:
        info = infos[name]
        digest.update(f"{name} {info.dtype} {list(info.shape)} {contents[name]}\n".encode())
    return digest.hexdigest()


def _digest_of(info: TensorInfo, block: memoryview) -> str:
    """Return the SHA-256 of a tensor's bytes in a safetensors file. Mutates: `block`."""
    digest = hashlib.sha256()
    left = info.end - info.start
    # Not by mmap: a file that shrinks meanwhile would end the process.
    with info.file.open("rb", buffering=0) as file:
        file.seek(info.start)
        while left:
            count = file.readinto(block[:left])
            if not count:
                raise CheckpointError(f"{info.file} ended within {info.name!r}, while it was read")
            digest.update(block[:count])
            left -= count
    return digest.hexdigest()
