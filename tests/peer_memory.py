"""GPUs' memory that engines of one process lend each other, in plain memory of the host."""

from __future__ import annotations

import pytest
import torch

from shared.peer import mailbox as mailbox_module


class FakeLent:
    """Memory that a draft lends."""

    def __init__(self, handle: bytes, num_bytes: int) -> None:
        self.handle = handle
        self.data = torch.zeros(num_bytes, dtype=torch.uint8)
        self.num_mapped = 0
        self.is_free = False

    def free(self) -> None:
        """Give it back; nobody may have it mapped."""
        assert not self.num_mapped and not self.is_free
        self.is_free = True


class FakeBorrowed:
    """A mapping of it."""

    def __init__(self, lent: FakeLent) -> None:
        self._lent = lent
        self.address = lent.data.data_ptr()
        lent.num_mapped += 1

    def close(self) -> None:
        """Unmap it."""
        self._lent.num_mapped -= 1
        self.address = 0


class FakeMemory:
    """PeerMemory of one GPU; all GPUs of `lent` reach each other.

    Args:
        lent: What all of them lend.
        refusal: Why nothing can be mapped; "": it can.
    """

    def __init__(self, gpu: str, lent: list[FakeLent], *, refusal: str = "") -> None:
        self.gpu = gpu
        self.lent = lent
        self.refusal = refusal

    def lend(self, num_bytes: int) -> FakeLent:
        """Allocate memory for others."""
        self.lent.append(FakeLent(bytes([len(self.lent)]) * 64, num_bytes))
        return self.lent[-1]

    def borrow(self, handle: bytes, gpu: str, num_bytes: int) -> FakeBorrowed:
        """Map memory that another one lends."""
        if self.refusal:
            raise OSError(self.refusal)
        (lent,) = [one for one in self.lent if one.handle == handle]
        assert gpu != self.gpu and lent.data.nbytes == num_bytes and not lent.is_free
        return FakeBorrowed(lent)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    """Let mailboxes that are made, or opened, from now on be those of a GPU."""
    monkeypatch.setattr(mailbox_module, "gpu_uuid", lambda device: gpu)
