"""Which targets a draft connects to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draft_service.allowed_targets import AllowedTargets
from shared.errors import ConfigError, InvalidArgumentError
from shared.messages import DraftOpen, SamplingParams
from tests.fakes import eventually

OPEN = DraftOpen(
    request_id="a",
    target_epoch=1,
    draft_epoch=1,
    target_address="",
    token_ids=(1,),
    sampling=SamplingParams(),
)


def is_allowed(targets: AllowedTargets, address: str, peer_address: str = "") -> bool:
    try:
        targets.check(replace(OPEN, target_address=address, target_peer_address=peer_address))
    except InvalidArgumentError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "address", "expected"),
    [
        ("10.0.0.5:50052", "10.0.0.5:50052", True),
        ("10.0.0.5:50052", "10.0.0.5:50053", False),
        ("10.0.0.5:50052", "10.0.0.6:50052", False),
        ("10.0.0.5", "10.0.0.5:1", True),
        ("1.2.3.4, 10.0.0.5", "10.0.0.5:1", True),
        ("10.0.0.0/8", "10.200.0.5:50052", True),
        ("10.0.0.0/8", "11.0.0.5:50052", False),
        ("10.0.0.0/8:50052", "10.0.0.5:50053", False),
        ("10.0.0.0/8", "metadata.internal:80", False),
        ("gpu0:50052", "gpu0:50052", True),
        ("gpu0:50052", "gpu1:50052", False),
        ("[fd00::5]:50052", "[fd00::5]:50052", True),
        ("fd00::5", "[fd00::5]:50052", True),
        ("fd00::/8", "[fd00::5]:50052", True),
        ("fd00::/8", "10.0.0.5:50052", False),
        ("10.0.0.5", "10.0.0.5:no", True),
        ("10.0.0.5:50052", "10.0.0.5:no", False),
        ("10.0.0.5:50052", "", False),
    ],
)
def test_an_address_is_allowed_or_not(text: str, address: str, *, expected: bool) -> None:
    assert is_allowed(AllowedTargets(text), address) is expected


@pytest.mark.parametrize(
    ("peer_address", "expected"),
    [
        ("", True),
        (":50062/00", True),
        ("10.0.0.5:50062/00", True),
        ("192.168.0.5:50062/00", True),
        ("192.168.0.6:50062/00", False),
        ("evil:50062/00", False),
    ],
)
def test_engines_connect_to_allowed_hosts_only(peer_address: str, *, expected: bool) -> None:
    targets = AllowedTargets("10.0.0.5:50052,192.168.0.5")
    assert is_allowed(targets, "10.0.0.5:50052", peer_address) is expected


@pytest.mark.asyncio
async def test_a_name_stands_for_all_its_addresses_also_when_the_name_service_fails() -> None:
    answers = [{"10.0.0.5", "10.0.0.6"}, set()]
    targets = AllowedTargets(
        "target_service:50052", look_up=lambda name: answers.pop(0) if answers else set()
    )
    targets.start()
    await eventually(lambda: is_allowed(targets, "10.0.0.6:50052"))
    assert is_allowed(targets, "10.0.0.5:50052")
    assert not is_allowed(targets, "10.0.0.7:50052")
    await targets.close()


@pytest.mark.parametrize("text", [":50052", "host:0", "host:70000", "host:x", "a,:1"])
def test_an_entry_that_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--targets holds"):
        AllowedTargets(text)
