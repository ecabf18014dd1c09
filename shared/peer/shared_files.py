"""Files in shared memory, through which the processes of one host share what they map.

A file gets its name only when it is complete, is its owner's alone, and is locked as long as its
maker lives, so that the next one can tell what a crash left.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

RING_DIR = Path("/dev/shm")
_NUM_TOKEN_BYTES = 16


class SharedFiles:
    """The files of one kind: those whose names begin alike, and end in a random token.

    Args:
        what: They are, for messages.
    """

    def __init__(self, prefix: str, *, what: str) -> None:
        self.prefix = prefix
        self._what = what
        self._name = re.compile(rf"{prefix}[0-9a-f]{{{2 * _NUM_TOKEN_BYTES}}}")

    def new_name(self) -> str:
        """Return a name that nobody can guess."""
        return self.prefix + secrets.token_hex(_NUM_TOKEN_BYTES)

    def is_name(self, name: str) -> bool:
        """Return whether a name can be that of a file of this kind, and of no other."""
        return self._name.fullmatch(name) is not None

    def open(self, directory: Path, name: str, *, is_writable: bool = False) -> int:
        """Return a descriptor of a file that another process of this user made.

        Raises: OSError if there is none.
        """
        if not self.is_name(name):
            raise FileNotFoundError(f"{name!r} is no name of a {self._what}")
        access = os.O_RDWR if is_writable else os.O_RDONLY
        fd = os.open(directory / name, access | os.O_NOFOLLOW | os.O_CLOEXEC)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            os.close(fd)
            raise PermissionError(f"{name} is not a file of this user")
        return fd

    def is_held(self, directory: Path, name: str) -> bool:
        """Return whether the maker of a file lives; False, too, if the file is gone, and True if it
        cannot be asked.
        """
        try:
            fd = self.open(directory, name, is_writable=True)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def remove_stale(self, directory: Path = RING_DIR) -> None:
        """Remove the files of makers that were killed: nobody holds their locks.

        What is mapped stays valid.
        """
        for path in directory.glob(f"{self.prefix}*"):
            with contextlib.suppress(OSError):  # another user's, locked, or gone meanwhile
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    logger.info("removed %s, which a target left that was killed", path)
                finally:
                    os.close(fd)


RINGS = SharedFiles("coppice-features-", what="feature ring")
MAILBOXES = SharedFiles("coppice-mailbox-", what="mailbox")


def mailbox_name(socket_name: str) -> str:
    """Return the name of the mailbox of the target that listens at a channel's name.

    The token is the same, so one name tells both.
    """
    return MAILBOXES.prefix + socket_name.rpartition("-")[2]


@contextlib.contextmanager
def create(path: Path, num_bytes: int) -> Iterator[tuple[int, mmap.mmap]]:
    """Make a file of zeros for the block to fill; it gets its name after the block.

    If the block raises, no file is left.

    Yields: Descriptor, which holds the lock and is the caller's to close; memory.
    Raises: OSError if there is no room, or no shared memory at all.
    """
    _require_room(path.parent, num_bytes)
    # Without a name until it is complete and locked: then nobody can find it half made.
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # All pages now: a full file system is an error here, and a fatal signal later.
        os.posix_fallocate(fd, 0, num_bytes)
        yield fd, mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        fcntl.flock(fd, fcntl.LOCK_EX)
        _publish(fd, path)
    except BaseException:
        os.close(fd)
        raise


def close(path: Path, fd: int) -> None:
    """Remove what `create` made; what is mapped stays valid."""
    path.unlink(missing_ok=True)
    os.close(fd)


def _require_room(directory: Path, num_bytes: int) -> None:
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if free < num_bytes:
        raise OSError(
            f"{directory} has {free >> 20} MiB left, {num_bytes >> 20} are needed; make it larger "
            "or lower --feature-ring-mb"
        )


def _publish(fd: int, path: Path) -> None:
    """Give a file without a name a name."""
    folder = os.open(path.parent, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with a folder's descriptor does Python follow the channel to the file itself.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
