"""Accepted paths through a mailbox: what comes out is what went in, or no path."""

from __future__ import annotations

import ctypes
import mmap
import random
import time

import pytest
import torch

from shared.kernels.dispatch import launch_counts, use_triton
from shared.kernels.mailbox_growth import advance_growth
from shared.kernels.mailbox_paths import post_paths, take_paths, take_rows
from shared.kernels.mailbox_words import MAX_PATH, TAG_BITS

VOCAB_SIZE = 50
SPARE_IDX = 77
POISON = -99
WAIT_US = 2_000_000


def word(round_tag: int, length: int, token: int) -> int:
    return round_tag << 40 | length << 32 | token


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host that kernels reach."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def guarded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host right behind memory that nobody may read."""
    if device.type == "cuda":
        return on_host(tensor, device)
    num_bytes = tensor.numel() * tensor.element_size()
    memory = mmap.mmap(-1, mmap.PAGESIZE + num_bytes)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mprotect(ctypes.c_void_p(view.data_ptr()), ctypes.c_size_t(mmap.PAGESIZE), 0)
    return view[mmap.PAGESIZE :].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def mailbox(num_slots: int, device: torch.device) -> torch.Tensor:
    return on_host(torch.full((num_slots, MAX_PATH), -1), device)


def at(rows: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return where the rows of each request are."""
    return torch.tensor([own.data_ptr() for own in rows]).to(device)


def never(device: torch.device) -> torch.Tensor:
    return on_host(torch.zeros(1, dtype=torch.int32), device)


def int32s(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def launches_of(name: str, device: torch.device) -> bool:
    return launch_counts().get(name, 0) == int(use_triton(torch.empty(0, device=device)))


def posted(round_tag: int, tokens: list[int]) -> list[int]:
    padded = tokens + [0] * (MAX_PATH - len(tokens))
    return [word(round_tag, len(tokens), token) for token in padded]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_steps", "width"), [(1, 1), (6, 80), (MAX_PATH, 2500), (MAX_PATH + 4, 80)]
)
def test_posting_writes_paths_and_their_rows_alone(
    device: torch.device, num_steps: int, width: int, dtype: torch.dtype
) -> None:
    rng = random.Random(num_steps)
    num_slots, slot = 7, [5, 0, -1, 6]
    round_tag = [rng.randrange(2**TAG_BITS) for _ in slot]
    round_tag[1] = round_tag[0] ^ 1  # both halves
    length = [num_steps, 1, 1, rng.randint(1, num_steps)]
    path_rows = [[rng.randrange(30) for _ in range(num_steps)] for _ in slot]
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    features = torch.randn(30, width).to(dtype)
    memory = mailbox(1 + num_slots, device)
    paths = memory[1:]
    rows, others = (
        on_host(torch.full((2, num_slots, MAX_PATH, width), POISON, dtype=dtype), device)
        for _ in range(2)
    )
    rows_of = [rows, others, others, rows]  # of two drafts
    expected, expected_rows, expected_others = paths.tolist(), rows.clone(), others.clone()
    for b, (row, number) in enumerate(zip(slot, round_tag, strict=True)):
        if row >= 0:
            kept = path_rows[b][: length[b]]
            # Of a path that is too long the first tokens, with its length: nobody takes it.
            expected[row] = posted(number, [tokens[at] for at in kept])[:MAX_PATH]
            kept = kept[:MAX_PATH]
            mine = expected_rows if rows_of[b] is rows else expected_others
            mine[number & 1, row, : len(kept)] = features[kept]
    given = [
        int32s(slot, device),
        int32s(round_tag, device),
        torch.tensor(length).to(device),
        torch.tensor(path_rows).to(device),
        int32s(tokens, device),
    ]
    post_paths(paths, at(rows_of, device), *given, features.to(device))
    finish(device)
    assert paths.tolist() == expected
    assert bool((memory[0] == -1).all())
    assert torch.equal(rows, expected_rows) and torch.equal(others, expected_others)
    assert launches_of("post_paths", device) and launches_of("post_rows", device)

    paths.fill_(-1)
    post_paths(paths, None, *given, None)
    finish(device)
    assert paths.tolist() == expected


def take(
    paths: torch.Tensor,
    slot: list[int],
    round_tag: list[int],
    width: int,
    device: torch.device,
    *,
    stop: torch.Tensor | None = None,
    timeout_us: int = 0,
    grace_us: int = WAIT_US,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what was taken, and the tensors that change: three more rows each than needed."""
    total = len(slot) * width + 3
    changed = [
        torch.full((total,), POISON).to(device),
        torch.arange(1, 1 + total, dtype=torch.int32).to(device),
        torch.full((len(slot) + 3,), POISON).to(device),
        torch.arange(len(slot) + 3).to(device),
    ]
    taken = take_paths(
        [paths],
        int32s([0] * len(slot), device),
        int32s(slot, device)[None],
        int32s([*round_tag, 0], device),
        never(device) if stop is None else stop,
        torch.zeros(1, dtype=torch.int64, device=device),
        *changed,
        num_reqs=len(slot),
        path_width=width,
        spare_idx=SPARE_IDX,
        vocab_size=VOCAB_SIZE,
        timeout_us=timeout_us,
        grace_us=grace_us,
    )
    return taken, changed


def naive_path(words: list[int], round_tag: int, width: int) -> list[int]:
    length = words[0] >> 32 & 0xFF
    tokens = [value & 0xFFFFFFFF for value in words[:length]]
    is_path = all(value >> 40 == round_tag for value in words) and length <= width
    return tokens if is_path and all(token < VOCAB_SIZE for token in tokens) else []


def check_taken(
    paths: torch.Tensor, slot: list[int], round_tag: list[int], width: int, device: torch.device
) -> list[list[int]]:
    taken, changed = take(paths, slot, round_tag, width, device)
    found = [
        [] if row < 0 else naive_path(paths[row].tolist(), number % 2**TAG_BITS, width)
        for row, number in zip(slot, round_tag, strict=True)
    ]
    assert taken.dtype == torch.int32 and taken.shape == (len(slot), 1 + MAX_PATH)
    assert taken.tolist() == [[len(p), *p, *[0] * (MAX_PATH - len(p))] for p in found]
    token_ids, slot_mapping, last_rows, hidden_idx = (tensor.tolist() for tensor in changed)
    total = len(slot) * width
    assert token_ids[total:] == [POISON] * 3 and last_rows[len(slot) :] == [POISON] * 3
    assert slot_mapping[total:] == [total + 1, total + 2, total + 3]
    assert hidden_idx[len(slot) :] == [len(slot), len(slot) + 1, len(slot) + 2]
    for b, path in enumerate(found):
        rest = width - len(path)
        mine = slice(b * width, (b + 1) * width)
        assert token_ids[mine] == path + [0] * rest
        assert slot_mapping[mine] == [*range(b * width + 1, b * width + len(path) + 1)] + [0] * rest
        assert last_rows[b] == b * width + max(len(path), 1) - 1
        assert hidden_idx[b] == (b if path else SPARE_IDX)
    return found


@pytest.mark.parametrize("width", [1, 4, MAX_PATH])
def test_paths_are_taken_whole_or_not_at_all(device: torch.device, width: int) -> None:
    rng = random.Random(width)
    round_tag = 2**TAG_BITS - 5
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(width)]
    good = posted(round_tag, tokens)
    stale = [good[:at] + posted(round_tag - 1, tokens)[at:] for at in (0, 1, 7)]
    late = [good[:at] + [-1] + good[at + 1 :] for at in (0, 4, 7)]
    outside = good[: width - 1] + [word(round_tag, width, VOCAB_SIZE)] + good[width:]
    huge = [word(round_tag, width, 2**32 - 1), *good[1:]]
    past = good[:width] + [word(round_tag, width, 2**31)] * (MAX_PATH - width)  # not read
    none, too_long, longest = (
        [word(round_tag, size, 1)] * MAX_PATH for size in (0, width + 1, 255)
    )
    below_zero = [good[0] - 2**63, *good[1:]]
    cases = [good, *stale, *late, outside, huge, past, none, too_long, longest, below_zero]
    cases += [[0] * MAX_PATH]
    cases += [[rng.getrandbits(64) - 2**63 for _ in range(MAX_PATH)] for _ in range(3)]
    memory = mailbox(1 + len(cases), device)
    memory[0] = torch.tensor(good)  # before the mailbox: slot -1 is none
    paths = memory[1:]
    for row, words in enumerate(cases):
        paths[row] = torch.tensor(words)
    slot = rng.sample(range(len(cases)), len(cases)) + [-1, 0]
    numbers = [round_tag] * len(cases) + [round_tag, round_tag + 2**TAG_BITS]
    found = check_taken(paths, slot, numbers, width, device)
    assert found[slot.index(0)] == found[-1] == tokens
    assert sum(map(bool, found)) == 3
    assert launches_of("take_paths", device)


def test_paths_of_every_length(device: torch.device) -> None:
    rng = random.Random(0)
    lengths = list(range(1, 9))
    paths = mailbox(8, device)
    for row, length in enumerate(lengths):
        words = posted(row + 1, [rng.randrange(VOCAB_SIZE) for _ in range(length)])
        paths[row] = torch.tensor(words)
    found = check_taken(paths, list(range(8)), list(range(1, 9)), 8, device)
    assert list(map(len, found)) == lengths


def test_no_requests(device: torch.device) -> None:
    check_taken(mailbox(1, device), [], [], 4, device)
    assert launch_counts() == {}


@pytest.mark.parametrize("num_mailboxes", [2, 3, 4])
def test_paths_are_taken_from_several_mailboxes(device: torch.device, num_mailboxes: int) -> None:
    rng = random.Random(num_mailboxes)
    mailboxes = [mailbox(6, device) for _ in range(num_mailboxes)]
    of_mailbox = [row % num_mailboxes for row in range(6)]
    slots = [[-1] * 8 for _ in mailboxes]  # wider than there are requests
    expected = []
    for row, own in enumerate(of_mailbox):
        slots[own][row] = slot = rng.randrange(6)
        mailboxes[own][slot] = -1
    for row, own in enumerate(of_mailbox):
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 4))]
        is_free = mailboxes[own][slots[own][row]][0] == -1  # of two in one place the first is there
        if is_free:
            mailboxes[own][slots[own][row]] = torch.tensor(posted(100 + row, tokens))
        expected.append(tokens if is_free else [])
    taken = take_paths(
        mailboxes,
        int32s(of_mailbox, device),
        torch.tensor(slots, dtype=torch.int32).to(device)[:, :6],
        int32s(list(range(100, 106)), device),
        never(device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.full((24,), POISON).to(device),
        torch.zeros(24, dtype=torch.int32, device=device),
        torch.zeros(6, dtype=torch.int64, device=device),
        torch.arange(6).to(device),
        num_reqs=6,
        path_width=4,
        spare_idx=SPARE_IDX,
        vocab_size=VOCAB_SIZE,
        timeout_us=0,
        grace_us=0,
    )
    assert taken.tolist() == [[len(p), *p, *[0] * (MAX_PATH - len(p))] for p in expected]
    assert sum(map(bool, expected)) >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("path_width", "width"), [(1, 1), (5, 80), (MAX_PATH, 2500)])
def test_rows_of_the_path_are_taken(
    device: torch.device, path_width: int, width: int, dtype: torch.dtype
) -> None:
    rng = random.Random(path_width)
    num_slots, slot, round_tag = 5, [3, -1, 0, 4], [6, 2, 2**TAG_BITS - 1, 4]
    length = [path_width, 1, 1, 0]
    rows = guarded(torch.randn(2, num_slots, MAX_PATH, width).to(dtype), device)
    taken = torch.full((4, 1 + MAX_PATH), POISON, dtype=torch.int32)
    taken[:, 0] = torch.tensor(length)
    total = 4 * path_width
    expected = torch.full((total + 3, width), float("nan")).to(dtype)
    features = expected.to(device, copy=True)
    expected[:total] = 0
    expected[path_width : 2 * path_width] = torch.nan  # another mailbox's
    for b in (0, 2, 3):
        mine = rows[round_tag[b] & 1, slot[b], : length[b]]
        expected[b * path_width : b * path_width + length[b]] = mine
    rows[rng.randrange(2), 1] = torch.nan  # nobody's
    take_rows(
        rows,
        int32s(slot, device),
        int32s(round_tag, device),
        taken.to(device),
        features,
        path_width=path_width,
    )
    assert torch.equal(features.cpu().nan_to_num(nan=POISON), expected.nan_to_num(nan=POISON))
    assert launches_of("take_rows", device)


@pytest.mark.parametrize("num_reqs", [0, 1, 5, 40])
def test_growth_goes_on_from_the_path(device: torch.device, num_reqs: int) -> None:
    rng = random.Random(num_reqs)
    length = [rng.choice([0, 1, 5, 8]) for _ in range(num_reqs)]
    taken = torch.full((num_reqs, 1 + MAX_PATH), POISON, dtype=torch.int32)
    taken[:, 0] = torch.tensor(length)
    fields = [torch.randint(1, 1000, (num_reqs + 3,)) for _ in range(7)]
    fields = [field if at in (1, 2) else field.int() for at, field in enumerate(fields)]
    expected = [field.tolist() for field in fields]
    for b, a in enumerate(length):
        for at in range(3):
            expected[at][b] += a
        if a == 0:
            for at in (0, 3, 4, 5, 6):
                expected[at][b] = 0
    fields = [field.to(device) for field in fields]
    advance_growth(taken.to(device), *fields)
    assert [field.tolist() for field in fields] == expected
    assert num_reqs == 0 or launches_of("advance_growth", device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_taking_waits_for_what_another_stream_posts(device: torch.device) -> None:
    slot, length, num_steps, width = [2, 0, 3, 1], [6, 1, 3, 2], 6, 12288
    paths = mailbox(4, device)
    rows = on_host(torch.zeros(2, 4, MAX_PATH, width, dtype=torch.bfloat16), device)
    slots, stop = int32s(slot, device), never(device)
    lengths, path_rows = torch.tensor(length).to(device), torch.arange(24).view(4, 6).to(device)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for round_tag in range(1, 6):  # the first time compiles, for longer than the other might wait
        tokens = torch.randint(VOCAB_SIZE, (24,), dtype=torch.int32)
        features = torch.randn(24, width).to(device, torch.bfloat16)
        taken_features = torch.empty(24, width, dtype=torch.bfloat16, device=device)
        given = [
            slots,
            int32s([round_tag] * 4, device),
            lengths,
            path_rows,
            tokens.to(device),
            features,
        ]
        torch.cuda.synchronize()
        if round_tag == 1:
            post_paths(paths, at([rows] * 4, device), *given)
            torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            taken, _ = take(
                paths, slot, [round_tag] * 4, num_steps, device, stop=stop, timeout_us=WAIT_US
            )
            take_rows(rows, slots, given[1], taken, taken_features, path_width=num_steps)
        if round_tag > 1:
            time.sleep(0.02)
            assert not streams[0].query()
            begin = time.monotonic()
            with torch.cuda.stream(streams[1]):
                post_paths(paths, at([rows] * 4, device), *given)
            torch.cuda.synchronize()
            assert time.monotonic() - begin < 0.5
        torch.cuda.synchronize()
        assert taken[:, 0].tolist() == length
        for b, a in enumerate(length):
            mine = slice(b * 6, b * 6 + a)
            assert taken[b, 1 : 1 + a].tolist() == tokens[mine].tolist()
            assert torch.equal(taken_features[mine], features[mine])
            assert not taken_features[b * 6 + a : (b + 1) * 6].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_taking_stops_when_told_and_gives_up(device: torch.device) -> None:
    paths, stop = mailbox(1, device), never(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first time compiles
        begin.record()
        taken, _ = take(paths, [0], [1], 4, device, stop=stop, timeout_us=20_000)
        end.record()
        torch.cuda.synchronize()
    assert 20 <= begin.elapsed_time(end) < 40
    assert not taken.any()
    begin.record()
    taken, _ = take(paths, [0], [1], 4, device, stop=stop, timeout_us=WAIT_US)
    end.record()
    time.sleep(0.02)
    assert not end.query()
    stop[0] = 1
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) < 200
    assert not taken.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_nobody_waits_long_for_a_path_that_did_not_come_with_the_others(
    device: torch.device,
) -> None:
    paths = mailbox(3, device)
    paths[1] = torch.tensor(posted(7, [3, 4]))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first time compiles
        begin.record()
        taken, _ = take(paths, [0, 1, 2], [7] * 3, 4, device, timeout_us=WAIT_US, grace_us=5_000)
        end.record()
        torch.cuda.synchronize()
    assert 4.5 <= begin.elapsed_time(end) < 50
    assert taken[:, 0].tolist() == [0, 2, 0]
