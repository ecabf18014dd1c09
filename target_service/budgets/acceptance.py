"""Learn from rounds how many tokens the next round of a request brings, by the shape of its tree.

The model: given that the node above was accepted, the chance that a node at the next depth is
accepted is

    1 - exp(-exp(mean_ease + ease + depth_offset[depth] + rung_offset[rung] + breadth[ease, rung]))

`ease` belongs to the request, `mean_ease` to all texts of the last seconds. The offsets belong to
the draft: deep nodes are harder, and a bushy tree tries more nodes per depth than a chain. How many
more depends on the text, because the best nodes are deep where it is easy and side by side where it
is hard: `breadth` says so, and is not learned. Both are 0 for a chain, since chains of all lengths
begin alike.

A round with n accepted drafts is n successful trials and, unless the tree ended there, one failed
trial. The other four terms are fitted to these trials by Newton steps of a regression with this
link (complementary log-log). A request about which little is known has the mean ease.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.messages import TreeShape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Requests fall into classes of ease: from one draft in 14 accepted (first class) to all of them
# (last). Requests of the first class get no tree: the cost of a tree is not known well enough to
# say that so few tokens pay for it.
_LEAST_EASE, _MOST_EASE = -2.6, 1.4
_CLASS_WIDTH = 0.125
NUM_CLASSES = 1 + round((_MOST_EASE - _LEAST_EASE) / _CLASS_WIDTH)
LAST_HOPELESS_CLASS = 6
"""One draft in seven accepted, or fewer: trees cost more than they bring, even to one request."""
# Chances hardly depend on more.
_LEAST_LINK, _MOST_LINK = -4.0, 2.0
_EASE = np.linspace(_LEAST_EASE, _MOST_EASE, NUM_CLASSES)
_LEAST_OF_CLASS = _EASE[1:] - _CLASS_WIDTH / 2
# First guess of the mean, before any round: in a chain two drafts of three are accepted.
_FIRST_EASE = math.log(-math.log(1 / 3))
# How the odds of a step grow with the logarithm of the nodes per step, and where they are those of
# a chain; trees of many nodes count as if they had no more than so many (`_breadth`). Fitted to
# trees of 8 to 32 nodes for an 8B's texts, easy and hard ones.
_BREADTH_GAIN, _BREADTH_OF_CHAIN = 0.232, 0.45
_MOST_NODES, _NODES_SCALE = 24.0, 20.0

# Share of the evidence about a request that is kept after each of its rounds with a tree.
_EVIDENCE_KEPT = 0.96
# Share that is kept after a round without a tree. While other requests have trees, the ease of a
# resting request goes back to the mean as well: a hard text is tried again after some dozens of
# rounds.
_EVIDENCE_KEPT_AT_REST = 0.995
# 1 / variance of ease among texts.
_PRIOR = 2.0
# A request counts as easier than its estimate by so many standard deviations, up to the mean.
_DOUBT = 0.5
# Prior evidence for the first guesses of the mean and of the offsets, and the share of evidence
# that is kept per step.
_MEAN_PRIOR, _MEAN_EVIDENCE_KEPT, _MEAN_DAMPING = 4.0, 0.98, 0.5
_OFFSET_PRIOR, _OFFSET_EVIDENCE_KEPT = 2000.0, 0.9995
_MOST_STEP = 0.7
_LEAST_INFORMATION = 1e-9
# Share by which the mean moves towards the ease of the requests of a step. The share is smaller if
# fewer requests run than before (the remembered number decays by _CROWD_KEPT per step): the last
# requests of a batch have its hardest texts.
_MEAN_WEIGHT, _CROWD_KEPT = 0.05, 0.99


class Acceptance:
    """The ease of every request, by its slot, and the offsets of the draft.

    Args:
        ladder: Shapes of rungs 1, 2, ...; rung 0 is the root alone.
        num_slots: Most requests at once.
    """

    def __init__(self, ladder: Sequence[TreeShape], num_slots: int) -> None:
        num_steps = [shape.num_steps for shape in ladder]
        self._num_steps = np.array([0, *num_steps])
        self._depth = np.arange(1, 1 + max(num_steps))
        self._mean = _FIRST_EASE
        self._mean_evidence = 0.0
        self._crowd = 1.0  # number of requests in the last steps, decaying
        self._ease = np.zeros(num_slots)
        self._evidence = np.zeros(num_slots)
        # Of all rungs, then of all depths: learned alike, so these are one array each. The offsets
        # of chains and of the first depth stay 0: ease covers them.
        is_chain = [True, *(shape.topk == 1 for shape in ladder)]
        self._stays = np.array([*is_chain, True, *[False] * (len(self._depth) - 1)])
        self._offset = np.zeros(len(self._stays))
        self._offset_evidence = np.zeros(len(self._stays))
        self._rung_offset, self._depth_offset = np.split(self._offset, [1 + len(ladder)])
        nothing = np.zeros(NUM_CLASSES)
        # [NUM_CLASSES, rungs]
        self._breadth = np.array([nothing, *map(_breadth, ladder)]).T

    def begin(self, slot: int) -> None:
        """Note that a new request holds a slot: nothing is known of it."""
        self._ease[slot] = self._evidence[slot] = 0.0

    def note_rounds(
        self, slots: Ints, rungs: Ints, num_accepted: Ints, most_steps: Ints | None = None
    ) -> None:
        """Learn from rounds with trees.

        Args:
            slots: [B], all different.
            rungs: [B], >= 1.
            num_accepted: [B], drafts on the accepted path, bonus tokens excluded.
            most_steps: [B], upper bound of each tree's steps; None: as many as its rung has.
        """
        accepted = num_accepted[:, None]
        num_steps = self._num_steps.take(rungs)
        if most_steps is not None:
            num_steps = np.minimum(num_steps, most_steps)
        is_trial = self._depth <= np.minimum(accepted + 1, num_steps[:, None])
        own_ease = self._ease.take(slots)
        ease = self._mean + own_ease
        offset = self._rung_offset.take(rungs) + self._breadth[_class_of(ease), rungs]
        link = ease[:, None] + self._depth_offset + offset[:, None]
        hazard = np.exp(_clipped(link, _LEAST_LINK, _MOST_LINK))
        refused = -hazard
        failure = np.exp(refused)
        odds = failure / (1.0 - failure)
        score = np.where(self._depth <= accepted, hazard * odds, refused)
        # Score and information of each trial, [2, B, D].
        trials = np.array((score, hazard * hazard * odds)) * is_trial
        of_requests = np.add.reduce(trials, axis=2)
        self._learn_ease(slots, own_ease, *of_requests)
        self._learn_mean(*np.add.reduce(trials.reshape(2, -1), axis=1).tolist())
        self._learn_offsets(rungs, of_requests, np.add.reduce(trials, axis=1))

    def note_rests(self, slots: Ints, *, returns: bool) -> None:
        """Forget a little about requests whose rounds have no trees.

        Args:
            returns: Move the ease of these requests back to the mean, so that they are tried
                again.
        """
        self._evidence[slots] *= _EVIDENCE_KEPT_AT_REST
        if returns:
            self._ease[slots] *= _EVIDENCE_KEPT_AT_REST
        else:  # so that the few trees of a trial move the mean
            self._mean_evidence *= _EVIDENCE_KEPT_AT_REST

    def recentre(self, slots: Ints) -> None:
        """Move the mean towards that of the running requests: new requests begin with it."""
        evidence = self._evidence.take(slots)
        known = evidence / (evidence + _PRIOR)
        self._crowd = max(float(len(slots)), _CROWD_KEPT * self._crowd)
        shift = _MEAN_WEIGHT * (float(np.add.reduce(known * self._ease.take(slots))) / self._crowd)
        shift = _bounded_mean(self._mean + shift) - self._mean
        self._mean += shift
        self._ease -= shift

    def classes(self, slots: Ints) -> Ints:
        """Return the class of each request, 0 .. NUM_CLASSES - 1, from hard to easy.

        A request counts as harder than the mean only as far as its rounds have shown it beyond
        doubt: one refused tree is no reason to rest.
        """
        ease = self._ease.take(slots)
        doubt = _DOUBT / np.sqrt(self._evidence.take(slots) + _PRIOR)
        return _class_of(self._mean + np.maximum(ease, np.minimum(ease + doubt, 0.0)))

    @property
    def mean_class(self) -> int:
        """Return the class of a request about which nothing is known."""
        return int(_LEAST_OF_CLASS.searchsorted(self._mean, side="right"))

    def promise(self, slots: Ints) -> Floats:
        """Return by request how much a trial promises: its ease, plus a bonus for uncertainty."""
        return self._ease[slots] + 1.0 / np.sqrt(self._evidence[slots] + _PRIOR)

    def gains(self) -> Floats:
        """Return expected tokens of a round, [NUM_CLASSES, rungs].

        They are 1 at rung 0, and never fewer at a higher rung; the first class has 1 at all rungs.
        """
        offset = self._rung_offset + self._breadth
        link = (_EASE[:, None] + offset)[:, :, None] + self._depth_offset
        chance = 1.0 - np.exp(-np.exp(_clipped(link, _LEAST_LINK, _MOST_LINK)))  # [C, R, D]
        chance *= self._depth <= self._num_steps[:, None]
        gains = 1.0 + np.cumprod(chance, axis=2).sum(axis=2)
        gains[0] = 1.0
        return np.maximum.accumulate(gains, axis=1)

    def _learn_ease(self, slots: Ints, ease: Floats, score: Floats, information: Floats) -> None:
        evidence = _EVIDENCE_KEPT * self._evidence.take(slots) + information
        with_prior = evidence + _PRIOR
        step = _clipped(score / with_prior, -_MOST_STEP, _MOST_STEP)
        forgotten = (1.0 - _EVIDENCE_KEPT) * _PRIOR / with_prior
        self._ease[slots] = (1.0 - forgotten) * ease + step
        self._evidence[slots] = evidence

    def _learn_mean(self, score: float, information: float) -> None:
        self._mean_evidence = _MEAN_EVIDENCE_KEPT * self._mean_evidence + information
        step = _MEAN_DAMPING * score / (self._mean_evidence + _MEAN_PRIOR)
        self._mean = _bounded_mean(self._mean + min(max(step, -_MOST_STEP), _MOST_STEP))

    def _learn_offsets(self, rungs: Ints, of_requests: Floats, of_depths: Floats) -> None:
        """Fit the offsets of rungs and depths.

        An offset of a rung is fitted to how its trees did compared with all trees of the step: what
        all trees did better or worse than expected is due to the texts, not to the rungs.

        Args:
            rungs: [B].
            of_requests: [2, B], score and information of each request.
            of_depths: [2, D].
        """
        score, information = of_requests
        count = len(self._rung_offset)
        by_rung = np.bincount(rungs, information, count)
        all_score, all_information = np.add.reduce(of_requests, axis=1).tolist()
        of_texts = all_score / max(all_information, _LEAST_INFORMATION)
        contrast = np.bincount(rungs, score, count) - of_texts * by_rung
        self._offset_evidence *= _OFFSET_EVIDENCE_KEPT
        self._offset_evidence += np.concatenate((by_rung, of_depths[1]))
        step = np.concatenate((contrast, of_depths[0])) / (self._offset_evidence + _OFFSET_PRIOR)
        step[self._stays] = 0.0
        self._offset += _clipped(step, -_MOST_STEP, _MOST_STEP)


def _breadth(shape: TreeShape) -> Floats:
    """Return by class how the odds of a tree's steps differ from a chain's, [NUM_CLASSES].

    They depend on nodes per step, of the steps that a chain of that depth is expected to get.
    """
    if shape.topk == 1:
        return np.zeros(NUM_CLASSES)
    chance = 1.0 - np.exp(-np.exp(_EASE))
    num_steps = (chance[:, None] ** np.arange(1 + shape.num_steps)).sum(axis=1)
    num_nodes = _MOST_NODES * (1.0 - math.exp(-shape.num_draft_tokens / _NODES_SCALE))
    return _BREADTH_GAIN * (np.log(num_nodes / num_steps) - _BREADTH_OF_CHAIN)


def _bounded_mean(mean: float) -> float:
    """Return a mean ease that does not take long to recover."""
    return min(max(mean, _LEAST_EASE), _MOST_LINK)


def _class_of(ease: Floats) -> Ints:
    return _LEAST_OF_CLASS.searchsorted(ease, side="right")


def _clipped(values: Floats, least: float, most: float) -> Floats:
    """Return clipped values. For a few hundred values np.clip takes three times as long."""
    clipped: Floats = np.minimum(np.maximum(values, least), most)
    return clipped
