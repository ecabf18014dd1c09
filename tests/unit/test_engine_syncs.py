"""A step waits for the device once, when it reads its result, and never to launch anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from shared.config import TargetConfig
from shared.messages import SamplingParams, TreeShape
from target_service.engine import TargetEngine
from target_service.engine_factory import create_engine
from tests.engines import Models, make_draft, make_target, random_tokens
from tests.local_pair import LocalPair, LocalRequest
from tests.waits import forbidden_waits

SHAPE = TreeShape(num_steps=3, topk=2, num_draft_tokens=6)
SAMPLING = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=30, seed=2),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, seed=3),
    SamplingParams(logit_bias=((3, 1.5), (8, -2.0))),
)


def requests(seed: int) -> list[LocalRequest]:
    """Return requests that together use all that a step can do."""
    rng = random.Random(seed)
    return [
        LocalRequest(
            prompt=random_tokens(rng, 5 + 17 * i),
            max_new_tokens=14,
            sampling=sampling,
            shape=SHAPE if i % 2 == 0 else None,
            min_new_tokens=3 * i,
            stop_token_ids=(7,),
            logprobs=i > 1,
            top_logprobs=i,
        )
        for i, sampling in enumerate(SAMPLING)
    ]


class Watch:
    """Counts reads, and forbids all other waiting within the steps of an engine.

    Args:
        mode: A block in which waiting is forbidden or allowed, as `is_forbidden` says.
    """

    def __init__(
        self,
        target: TargetEngine,
        monkeypatch: pytest.MonkeyPatch,
        mode: Callable[..., AbstractContextManager[None]],
    ) -> None:
        self.num_reads = 0
        self._mode = mode
        read, step = target.runner.finish_read, target.step

        def counted_read(*args: Any) -> Any:
            self.num_reads += 1
            return read(*args)

        def watched_step() -> Any:
            with self._mode(is_forbidden=True):
                return step()

        monkeypatch.setattr(target.runner, "finish_read", self.allowed(counted_read))
        monkeypatch.setattr(target, "step", watched_step)

    def allowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, free to wait."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._mode(is_forbidden=False):
                return function(*args, **kwargs)

        return wrapped


def test_only_the_read_looks_at_values(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where nothing waits: what is launched around the kernels asks for no values."""
    pairing = models.pairing("eagle")
    target = make_target(pairing, prefill_chunk_len=32)
    is_guarded = False

    @contextmanager
    def guard(*, is_forbidden: bool) -> Iterator[None]:
        nonlocal is_guarded
        before, is_guarded = is_guarded, is_forbidden
        try:
            yield
        finally:
            is_guarded = before

    watch = Watch(target, monkeypatch, guard)
    # Not "numpy": of what is on a device it does not wait, it raises.
    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def guarded(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            assert not is_guarded, f"{name} waits for the device"
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, guarded)
    # The references of the kernels may look, and so may the model, which runs only those.
    monkeypatch.setattr(target.runner, "extend", watch.allowed(target.runner.extend))
    for place in (
        "target_service.sampler.sample",
        "target_service.sampler.apply_penalties",
        "target_service.verify.accept_walk",
        "target_service.verify.chosen_logprobs",
        "target_service.verify.move_paths",
    ):
        module, _, name = place.rpartition(".")
        function = getattr(__import__(module, fromlist=[name]), name)
        monkeypatch.setattr(place, watch.allowed(function))
    LocalPair(target, make_draft(pairing)).run(requests(0))
    assert watch.num_reads == target.load.num_steps > 10
    assert target.load.num_moved_rounds > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_step_waits_once(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    pairing = models.pairing("eagle")
    config = TargetConfig(
        model=str(pairing.target),
        draft_model=str(pairing.draft),
        algorithm=pairing.algorithm,
        device="cuda",
        num_pages=512,
        prefill_chunk_len=32,
        self_test=False,
    )
    target = create_engine(config, lambda *_: None)
    draft = make_draft(pairing)
    LocalPair(target, draft).run(requests(0))  # compiles what the second run needs
    num_steps = target.load.num_steps

    watch = Watch(target, monkeypatch, forbidden_waits)
    LocalPair(target, draft).run(requests(1))
    assert watch.num_reads == target.load.num_steps - num_steps > 10
