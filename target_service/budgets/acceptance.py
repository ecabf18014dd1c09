"""How many tokens a round of a request brings, by the shape of its tree: learned from its rounds.

The chance that the node below an accepted one is accepted as well is

    1 - exp(-exp(mean_ease + ease + depth_offset[depth] + rung_offset[rung]))

where `ease` is the request's own, `mean_ease` that of the texts of the last seconds, and the
offsets are the draft's: how much harder deep nodes are, and how much more a bushy tree tries than a
chain, whose offset is 0, because chains begin alike, however long they are. Each round of a request
is a few trials of that, the last of which may have failed; all four parts are fitted to them by
Newton steps of a regression with this link (complementary log-log). A request about which little is
known is as easy as the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.messages import TreeShape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Ease of the classes into which requests fall: from one draft in 14 accepted to all of them. Those
# of the first class get no tree: what it costs is not known so well that less could pay for it.
_LEAST_EASE, _MOST_EASE = -2.6, 1.4
_CLASS_WIDTH = 0.125
NUM_CLASSES = 1 + round((_MOST_EASE - _LEAST_EASE) / _CLASS_WIDTH)
LAST_HOPELESS_CLASS = 6
"""One draft in seven is accepted, or fewer: trees bring less than they take even to one request."""
# Two drafts of three accepted, in a chain: what is expected of a draft that nobody has seen yet.
_FIRST_EASE = math.log(-math.log(1 / 3))
# More nodes per step make a step succeed as if it were tried so much more often: measured.
_BREADTH_GAIN = 0.36

# Of what is known of a request, what is left after another round of it ..
_EVIDENCE_KEPT = 0.96
# .. and after one without a tree. Beside others with trees its ease goes back to the mean as well:
# a hard text is tried again after some dozens of rounds.
_EVIDENCE_KEPT_AT_REST = 0.995
# 1 / variance of ease among texts.
_PRIOR = 2.0
# Standard deviations of what is known of a request by which it may be easier than it seems.
_DOUBT = 0.5
# What the first guesses of the mean and of the offsets are worth, and what is kept per step.
_MEAN_PRIOR, _MEAN_EVIDENCE_KEPT, _MEAN_DAMPING = 4.0, 0.98, 0.5
_OFFSET_PRIOR, _OFFSET_EVIDENCE_KEPT = 2000.0, 0.9995
_MOST_STEP = 0.7
_LEAST_INFORMATION = 1e-9
# Of what the requests of a step differ from the mean, what moves into it; less of few of many that
# ran before, of whose number so much is kept per step: those of a batch that end last are its
# hardest texts.
_MEAN_WEIGHT, _CROWD_KEPT = 0.05, 0.99


class Acceptance:
    """What is known of every request, by its slot, and of the draft.

    Args:
        ladder: Shapes of rungs 1, 2, ..; rung 0 is the root alone.
        num_slots: Requests that there can be at once.
    """

    def __init__(self, ladder: Sequence[TreeShape], num_slots: int) -> None:
        num_steps = [shape.num_steps for shape in ladder]
        self._num_steps = np.array([0, *num_steps])
        self._depth = np.arange(1, 1 + max(num_steps))
        self._mean = _FIRST_EASE
        self._mean_evidence = 0.0
        self._crowd = 1.0  # requests that ran in the last steps
        self._ease = np.zeros(num_slots)
        self._evidence = np.zeros(num_slots)
        self._depth_offset = np.zeros(len(self._depth))
        self._depth_evidence = np.zeros(len(self._depth))
        self._is_chain = np.array([True, *(shape.topk == 1 for shape in ladder)])
        self._rung_offset = np.array([0.0, *map(_first_offset, ladder)])
        self._rung_evidence = np.zeros(1 + len(ladder))

    def begin(self, slot: int) -> None:
        """Take note that another request has a slot, of which nothing is known."""
        self._ease[slot] = self._evidence[slot] = 0.0

    def note_rounds(
        self, slots: Ints, rungs: Ints, num_accepted: Ints, most_steps: Ints | None = None
    ) -> None:
        """Learn from rounds with trees.

        Args:
            slots: [B], all different.
            rungs: [B], 1 or more.
            num_accepted: [B], drafts on the accepted path.
            most_steps: [B], steps that the trees have at most; None: as many as their rungs.
        """
        accepted = num_accepted[:, None]
        num_steps = self._num_steps[rungs]
        if most_steps is not None:
            num_steps = np.minimum(num_steps, most_steps)
        is_trial = self._depth <= np.minimum(accepted + 1, num_steps[:, None])
        ease = self._mean + self._ease[slots, None]
        link = ease + self._depth_offset + self._rung_offset[rungs, None]
        hazard = np.exp(_clipped(link, -4.0, 2.0))
        failure = np.exp(-hazard)
        odds = failure / (1.0 - failure)
        score = np.where(self._depth <= accepted, hazard * odds, -hazard) * is_trial  # [B, D]
        information = hazard * hazard * odds * is_trial
        of_requests = score.sum(axis=1), information.sum(axis=1)
        self._learn_ease(slots, *of_requests)
        self._learn_mean(float(score.sum()), float(information.sum()))
        self._learn_depths(score.sum(axis=0), information.sum(axis=0))
        self._learn_rungs(rungs, *of_requests)

    def note_rests(self, slots: Ints, *, returns: bool) -> None:
        """Forget a little of requests whose rounds have no trees.

        Args:
            returns: They are to be tried again by and by.
        """
        self._evidence[slots] *= _EVIDENCE_KEPT_AT_REST
        if returns:
            self._ease[slots] *= _EVIDENCE_KEPT_AT_REST
        else:  # so that few trees say something of all texts when some are tried
            self._mean_evidence *= _EVIDENCE_KEPT_AT_REST

    def recentre(self, slots: Ints) -> None:
        """Let the mean be that of the requests that run, so that others begin there."""
        evidence = self._evidence[slots]
        known = evidence / (evidence + _PRIOR)
        self._crowd = max(float(len(slots)), _CROWD_KEPT * self._crowd)
        shift = _MEAN_WEIGHT * float((known * self._ease[slots]).sum() / self._crowd)
        shift = max(shift, _LEAST_EASE - self._mean)
        self._mean += shift
        self._ease -= shift

    def classes(self, slots: Ints) -> Ints:
        """Return the class of each request, 0 .. NUM_CLASSES - 1; the easiest are the last.

        A request is harder than the mean only by what its rounds have shown beyond doubt: one tree
        that was refused is no reason to rest.
        """
        ease = self._ease[slots]
        doubt = _DOUBT / np.sqrt(self._evidence[slots] + _PRIOR)
        return _class_of(self._mean + np.maximum(ease, np.minimum(ease + doubt, 0.0)))

    @property
    def mean_class(self) -> int:
        """Return the class of a request of which nothing is known."""
        return int(_class_of(np.array(self._mean)))

    def promise(self, slots: Ints) -> Floats:
        """Return what makes requests worth a try: ease, and more of those less well known."""
        return self._ease[slots] + 1.0 / np.sqrt(self._evidence[slots] + _PRIOR)

    def gains(self) -> Floats:
        """Return [NUM_CLASSES, rungs], the tokens that a round of each class is expected to bring:
        1 at rung 0, and more the higher the rung, but for the first class.
        """
        ease = np.linspace(_LEAST_EASE, _MOST_EASE, NUM_CLASSES)
        link = ease[:, None, None] + self._rung_offset[:, None] + self._depth_offset
        chance = 1.0 - np.exp(-np.exp(_clipped(link, -4.0, 2.0)))  # [C, R, D]
        chance *= self._depth <= self._num_steps[:, None]
        gains = 1.0 + np.cumprod(chance, axis=2).sum(axis=2)
        gains[0] = 1.0
        return np.maximum.accumulate(gains, axis=1)

    def _learn_ease(self, slots: Ints, score: Floats, information: Floats) -> None:
        evidence = _EVIDENCE_KEPT * self._evidence[slots] + information
        step = _clipped(score / (evidence + _PRIOR), -_MOST_STEP, _MOST_STEP)
        forgotten = (1.0 - _EVIDENCE_KEPT) * _PRIOR / (evidence + _PRIOR)
        self._ease[slots] = (1.0 - forgotten) * self._ease[slots] + step
        self._evidence[slots] = evidence

    def _learn_mean(self, score: float, information: float) -> None:
        self._mean_evidence = _MEAN_EVIDENCE_KEPT * self._mean_evidence + information
        step = _MEAN_DAMPING * score / (self._mean_evidence + _MEAN_PRIOR)
        mean = self._mean + min(max(step, -_MOST_STEP), _MOST_STEP)
        self._mean = max(mean, _LEAST_EASE)  # from further down it would take long to come back

    def _learn_depths(self, score: Floats, information: Floats) -> None:
        """Fit the offsets of depths but the first, which is that of the requests' ease."""
        self._depth_evidence *= _OFFSET_EVIDENCE_KEPT
        self._depth_evidence += information
        step = score / (self._depth_evidence + _OFFSET_PRIOR)
        self._depth_offset[1:] += _clipped(step, -_MOST_STEP, _MOST_STEP)[1:]

    def _learn_rungs(self, rungs: Ints, score: Floats, information: Floats) -> None:
        """Fit the offsets of rungs to what their trees did beside those of others in the same step:
        what all of them did better or worse is the texts'.
        """
        count = len(self._rung_offset)
        by_rung = np.bincount(rungs, information, count)
        self._rung_evidence *= _OFFSET_EVIDENCE_KEPT
        self._rung_evidence += by_rung
        of_texts = float(score.sum()) / max(float(information.sum()), _LEAST_INFORMATION)
        contrast = np.bincount(rungs, score, count) - of_texts * by_rung
        step = contrast / (self._rung_evidence + _OFFSET_PRIOR)
        step[self._is_chain] = 0.0
        self._rung_offset += _clipped(step, -_MOST_STEP, _MOST_STEP)


def _first_offset(shape: TreeShape) -> float:
    """Return how much more a tree of a shape tries per step than a chain, as a logarithm."""
    nodes_per_step = shape.num_draft_tokens / (1 + shape.num_steps)
    return math.log(1.0 + _BREADTH_GAIN * math.log(max(nodes_per_step, 1.0)))


def _class_of(ease: Floats) -> Ints:
    place = np.rint((ease - _LEAST_EASE) * (1 / _CLASS_WIDTH))
    return _clipped(place, 0.0, NUM_CLASSES - 1.0).astype(np.int64)


def _clipped(values: Floats, least: float, most: float) -> Floats:
    """Return what np.clip does, in a third of its time for a few hundred values."""
    clipped: Floats = np.minimum(np.maximum(values, least), most)
    return clipped
