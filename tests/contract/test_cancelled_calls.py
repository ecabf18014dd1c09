"""A server that stops may cancel a call that came a moment too late: clients come again."""

from __future__ import annotations

import pytest

from coppice import AsyncClient, CancelledError, Client, UnavailableError
from tests.fakes.generation import FakeGeneration, serving

PROMPT = [3, 4]
OUTPUT = (7, 8, 9)


def test_a_blocking_client_comes_again() -> None:
    generation = FakeGeneration(num_cancelled=1)
    with serving(generation) as address, Client(address) as client:
        assert client.generate(token_ids=PROMPT, max_new_tokens=3).token_ids == OUTPUT
    assert len(generation.requests) == 2


@pytest.mark.asyncio
async def test_a_client_of_asyncio_comes_again() -> None:
    generation = FakeGeneration(num_cancelled=1)
    with serving(generation) as address:
        async with AsyncClient(address) as client:
            done = await client.generate(token_ids=PROMPT, max_new_tokens=3)
    assert done.token_ids == OUTPUT and len(generation.requests) == 2


def test_who_must_not_come_again_is_told_that_the_server_is_away() -> None:
    generation = FakeGeneration(num_cancelled=1)
    with (
        serving(generation) as address,
        Client(address, max_retries=0) as client,
        pytest.raises(UnavailableError, match="ended the call"),
    ):
        client.generate(token_ids=PROMPT, max_new_tokens=3)


def test_a_closed_blocking_client_says_so() -> None:
    client = Client("127.0.0.1:1")
    client.close()
    for ask in (client.models, lambda: client.generate("a"), lambda: next(client.stream("a"))):
        with pytest.raises(CancelledError, match="this client is closed"):
            ask()


@pytest.mark.asyncio
async def test_a_closed_client_of_asyncio_says_so() -> None:
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    copy = client.on_behalf_of(())
    for asked in (client.models(), client.generate("a"), anext(copy.stream("a"))):
        with pytest.raises(CancelledError, match="this client is closed"):
            await asked
