"""The ring in shared memory: rows come back as written or not at all, and no file is left."""

from __future__ import annotations

import gc
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.messages import RingSpan
from shared.peer import ring as ring_module
from shared.peer.ring import (
    RING_DIR,
    FeatureRing,
    RingReader,
    read_nonce,
)
from shared.peer.shared_files import RINGS

SMALL = 64 * 1024


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=RING_DIR) as name:
        yield Path(name)


@pytest.fixture
def ring(folder: Path) -> FeatureRing:
    return FeatureRing(SMALL, directory=folder)


@pytest.fixture
def reader(folder: Path) -> RingReader:
    return RingReader(folder)


def rows_of(seed: int, shape: tuple[int, int] = (3, 500)) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write(ring: FeatureRing, rows: NDArray[np.uint8]) -> RingSpan:
    ring.start_step()
    span = ring.write(rows)
    assert span is not None
    return span


def lap(ring: FeatureRing) -> None:
    """Overwrite everything once."""
    for seed in range(8):
        write(ring, rows_of(1000 + seed, (1, ring.capacity // 8)))


def test_rows_come_back_as_they_were_written(ring: FeatureRing, reader: RingReader) -> None:
    """Of any size and seed; what is more than most of a lap old is refused, never wrong."""
    rng = random.Random(0)
    held: list[tuple[RingSpan, NDArray[np.uint8]]] = []
    num_refused = 0
    for seed in range(400):
        rows = rows_of(seed, (rng.randint(1, 5), rng.choice([1, 63, 64, 577, 1600])))
        held.append((write(ring, rows), rows))
        for span, want in held:
            got = reader.read(span)
            if got is None:
                num_refused += 1
                age = held[-1][0].begin + rows.nbytes - span.begin
                assert age > ring.capacity * 3 // 4, "refused too early"
            else:
                assert got.tobytes() == want.tobytes()
        held = held[-60:]
    assert num_refused > 100


def test_a_span_never_wraps_and_is_aligned_for_any_dtype(ring: FeatureRing) -> None:
    for seed in range(100):
        span = write(ring, rows_of(seed))
        assert span.begin % 64 == 0
        assert span.begin % ring.capacity + span.num_bytes <= ring.capacity


def test_rows_that_were_overwritten_are_refused(ring: FeatureRing, reader: RingReader) -> None:
    span = write(ring, rows_of(0))
    assert reader.read(span) is not None
    lap(ring)
    assert reader.read(span) is None


def test_rows_that_are_overwritten_during_the_copy_are_refused(
    ring: FeatureRing, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = write(ring, rows_of(0))
    is_intact = ring_module._MappedRing._is_intact
    answers = []

    def overwrite_after_the_first_look(mapped: ring_module._MappedRing, span: RingSpan) -> bool:
        answers.append(is_intact(mapped, span))
        if len(answers) == 1:
            lap(ring)
        return answers[-1]

    monkeypatch.setattr(ring_module._MappedRing, "_is_intact", overwrite_after_the_first_look)
    assert reader.read(span) is None
    assert answers == [True, False]


def test_rows_that_were_never_written_are_refused(ring: FeatureRing, reader: RingReader) -> None:
    span = write(ring, rows_of(0))
    for begin, num_bytes in ((span.begin + 4096, 100), (ring.capacity - 10, 100), (0, 4 * SMALL)):
        assert reader.read(RingSpan(ring=ring.name, begin=begin, num_bytes=num_bytes)) is None


def test_the_writer_takes_half_a_lap_at_a_time(ring: FeatureRing, reader: RingReader) -> None:
    """So what one step wrote is all there when the reader hears of it."""
    ring.start_step()
    rows = rows_of(0)
    spans = []
    while (span := ring.write(rows)) is not None:
        spans.append(span)
    assert ring.capacity // 2 - 4096 < sum(span.num_bytes for span in spans) <= ring.capacity // 2
    assert all(reader.read(span) is not None for span in spans)
    assert ring.write(rows) is None
    ring.start_step()
    assert ring.write(rows) is not None
    assert ring.write(rows_of(0, (1, ring.capacity // 8 + 1))) is None, "too long for any batch"


def test_only_its_owner_can_open_it_and_nobody_can_guess_it(
    ring: FeatureRing, folder: Path
) -> None:
    other = FeatureRing(SMALL, directory=folder)
    assert stat.S_IMODE((folder / ring.name).stat().st_mode) == 0o600
    assert RINGS.is_name(ring.name) and ring.name != other.name and ring.nonce != other.nonce
    assert read_nonce(ring.name, directory=folder) == ring.nonce


@pytest.mark.parametrize("name", ["", "../x", "/etc/passwd", "coppice-features-0", "x" * 49])
def test_other_files_are_not_opened(reader: RingReader, name: str, folder: Path) -> None:
    with pytest.raises(OSError):
        read_nonce(name, directory=folder)
    assert reader.read(RingSpan(ring=name, begin=0, num_bytes=1)) is None


def test_a_link_or_a_file_of_another_kind_is_refused(ring: FeatureRing, folder: Path) -> None:
    name = "coppice-features-" + "0" * 32
    (folder / name).symlink_to(folder / ring.name)
    with pytest.raises(OSError):
        read_nonce(name, directory=folder)
    (folder / name).unlink()
    (folder / name).write_bytes(bytes(8192))
    with pytest.raises(OSError, match="not a feature ring"):
        read_nonce(name, directory=folder)


def test_too_little_room_is_a_clear_error(folder: Path) -> None:
    free = os.statvfs(folder)
    with pytest.raises(OSError, match="MiB left.*--feature-ring-mb"):
        FeatureRing(2 * free.f_bavail * free.f_frsize, directory=folder)
    assert list(folder.iterdir()) == []


def test_its_file_goes_with_it_and_what_is_mapped_stays(
    ring: FeatureRing, reader: RingReader, folder: Path
) -> None:
    rows = rows_of(0)
    span = write(ring, rows)
    assert reader.read(span) is not None
    ring.close()
    assert list(folder.iterdir()) == []
    got = reader.read(span)
    assert got is not None and got.tobytes() == rows.tobytes()
    # A reader that comes now finds nothing; one that maps another ring forgets this one.
    assert RingReader(folder).read(span) is None
    other = FeatureRing(SMALL, directory=folder)
    assert reader.read(write(other, rows)) is not None
    assert reader.read(span) is None
    del other
    gc.collect()
    assert list(folder.iterdir()) == []


WRITER = """
import signal, sys
from pathlib import Path
from shared.peer.ring import FeatureRing
ring = FeatureRing(65536, directory=Path(sys.argv[1]))
print(ring.name, flush=True)
sys.stdin.read()
"""


def start_writer(directory: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_ring_that_is_gone_is_told_of_once(
    ring: FeatureRing, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each round of each request asks for it."""
    span = ring.write(np.zeros((1, 64), np.uint8))
    assert span is not None
    ring.close()
    reader = RingReader(folder)
    assert [reader.read(span) for _ in range(3)] == [None] * 3
    assert caplog.text.count("cannot be read") == 1


def test_a_writer_that_ends_takes_it_along_and_a_killed_ones_is_swept(folder: Path) -> None:
    ended, name = start_writer(folder)
    assert (folder / name).exists()
    ended.communicate()
    assert ended.returncode == 0 and not (folder / name).exists()

    killed, left = start_writer(folder)
    alive, used = start_writer(folder)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (folder / left).exists()
    (folder / "someone-else").touch()
    RINGS.remove_stale(folder)
    assert {path.name for path in folder.iterdir()} == {used, "someone-else"}
    alive.communicate()


def test_a_reader_in_another_process_reads_it(ring: FeatureRing, folder: Path) -> None:
    rows = rows_of(7)
    span = write(ring, rows)
    script = (
        "import sys; from pathlib import Path; from shared.peer.ring import RingReader;"
        "from shared.messages import RingSpan;"
        f"span = RingSpan(ring={span.ring!r}, begin={span.begin}, num_bytes={span.num_bytes});"
        "sys.stdout.buffer.write(RingReader(Path(sys.argv[1])).read(span).tobytes())"
    )
    command = [sys.executable, "-c", script, str(folder)]
    got = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    assert got == rows.tobytes()
