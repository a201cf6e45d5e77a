"""``state_dict()`` and ``load_state_dict()``: where a loader stands, and how a pass goes on from there.

All of it runs in the trainer, in the thread that iterates; nothing blocks. A state is O(1) to make and small (22 KB at
most, plus what a sampler's own ``state_dict`` holds): numbers, and the generators' states from just before the sampler
was asked for its first indices. To go on, the sampler is asked again from these states, and what was delivered is
skipped: indices are drawn again, samples are not.

    book.begin(loader) --> PassStart            before the base class draws anything for the pass
    start.open(iter(sampler)) --> indices       what the pass takes its batches from; skips after resuming
    start.progress = lambda: schedule.progress  asked by state_dict
    start.end()                                 StopIteration was raised: the next pass is what the state means

The global generators are put back at ``load_state_dict`` to where they were at ``state_dict``, and going on leaves them
alone: a program that restores them by itself, before or after, finds what it put there. So the passes that follow have
the same order and seeds as in an undisturbed run. Not exact is only a sampler that goes on drawing from a *global*
generator while the program trains with it.
"""

from __future__ import annotations

import base64
import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headrace.errors import UsageError
from headrace.loader.generators import TorchState
from headrace.loader.seeding import Generators

VERSION = 1
#: What a state must have; anything else is not ours.
_KEYS = ("headrace_loader", "epoch", "base_seed", "next_batch", "ahead", "is_midway", "num_batches", "now", "start")


class ResumeBook:
    """What one loader remembers, so that it can say where it stands."""

    def __init__(self) -> None:
        #: Number of the pass that begins next; part of the place that draws follow.
        self.epoch = 0
        self._current: PassStart | None = None
        self._pending: dict[str, Any] | None = None
        self._globals: Generators | None = None

    def begin(self, loader: Any) -> PassStart:
        """A pass begins. Call it before anything is drawn for it, DataLoader's own base seed included."""
        pending, self._pending = self._pending, None
        resumed = pending if pending is not None and pending["is_midway"] else None
        start = PassStart(self, loader, self._held(loader), resumed)
        self.epoch = start.epoch + 1
        self._current = start
        return start

    def state_dict(self, loader: Any) -> dict[str, Any]:
        """Where the last pass stands, or what comes next. Plain data, JSON too unless a sampler's own state is not."""
        if self._pending is not None:
            return copy.deepcopy(self._pending)
        current = self._current
        state: dict[str, Any] = {"headrace_loader": VERSION, "num_batches": _len(loader)}
        if current is None:
            # What the sampler draws from is not known yet.
            return state | self._between(loader) | {"now": self._now(loader, ("PYTHON", "NUMPY"))}
        return state | current._state(loader) | {"now": self._now(loader, current._drawn)}

    def _between(self, loader: Any) -> dict[str, Any]:
        return {
            "sampler": _sampler_state(_samplers(loader)),
            "epoch": self.epoch,
            "base_seed": None,
            "next_batch": 0,
            "ahead": [],
            "is_midway": False,
            "start": {},
        }

    def load_state_dict(self, loader: Any, state: dict[str, Any]) -> None:
        """The next pass goes on where the state was made. Restores the generators, see above.

        Raises:
            UsageError: No state of a Loader, of a newer release, or of a pass over another number of batches.
        """
        _check(state, loader)
        self._current, self._pending, self.epoch = None, copy.deepcopy(state), state["epoch"]
        held = self._held(loader)
        held.restore({name: saved for name, saved in state["now"].items() if name in held.names})
        _restore_sampler(_samplers(loader), state.get("sampler"))

    def _held(self, loader: Any) -> _Held:
        if self._globals is None:
            self._globals = Generators.of_process()
        return _Held(self._globals, loader)

    def _now(self, loader: Any, drawn: tuple[str, ...]) -> dict[str, Any]:
        """Of the global generators torch's, from which passes are seeded, and those that the sampler drew from."""
        held = self._held(loader)
        kept = {"TORCH", *drawn, *(name for name in held.names if name.startswith("own"))}
        return {name: _to_plain(state) for name, state in held.read().items() if name in kept}


class PassStart:
    """The beginning of one pass: made by ``ResumeBook.begin``.

    Attributes:
        epoch: Number of the pass.
        first_batch: Number of the batch that is delivered first.
        skip: Batches after it that were delivered before the state was made (``in_order=False``).
        base_seed: To be used in place of the one that was drawn; None: use that one, and set it here.
        is_resumed: Whether this pass goes on from a state.
        progress: Gives the first batch not delivered, and those after it that were (``Schedule.progress``); set by the
            iterator, to something that does not hold the loader.
    """

    def __init__(self, book: ResumeBook, loader: Any, held: _Held, resumed: dict[str, Any] | None) -> None:
        # Nothing here holds the loader: it must go when its user lets it go.
        self._book, self._samplers, self._held = book, _samplers(loader), held
        self.is_resumed = resumed is not None
        self.epoch: int = book.epoch if resumed is None else resumed["epoch"]
        self.first_batch: int = 0 if resumed is None else resumed["next_batch"]
        self.skip: tuple[int, ...] = () if resumed is None else tuple(resumed["ahead"])
        self.base_seed: int | None = None if resumed is None else resumed["base_seed"]
        self.progress: Callable[[], tuple[int, tuple[int, ...]]] | None = None
        self._is_over = False
        self._sampler = _sampler_state(self._samplers) if resumed is None else resumed.get("sampler")
        # States before the sampler was asked for an iterator, and before that was asked for the first indices.
        self._before = held.read()
        self._saved: dict[str, Any] = {} if resumed is None else resumed["start"]
        self._drawn: tuple[str, ...] = () if resumed is None else tuple(self._saved.get("next", ()))

    def open(self, indices: Iterator[Any]) -> Iterator[Any]:
        """What the pass takes its indices from.

        Args:
            indices: ``iter(sampler)``, as DataLoader has made it since ``begin``.
        """
        if self.is_resumed:
            return self._reopen()
        opened = self._held.read()
        # Most samplers draw when they are asked for the first index; some when they are asked for an iterator.
        eager = [name for name, state in opened.items() if state != self._before[name]]
        return self._first(indices, eager)

    def _first(self, indices: Iterator[Any], eager: list[str]) -> Iterator[Any]:
        asked = self._held.read()
        try:
            first = next(indices)
        except StopIteration:
            return
        finally:
            after = self._held.read()
            drawn = {name for name, state in after.items() if state != asked[name]} | set(eager)
            self._saved = {
                "iter": {name: self._before[name] for name in eager},
                "next": {name: asked[name] for name in drawn},
            }
            self._drawn = tuple(sorted(drawn))
        yield first
        yield from indices

    def _reopen(self) -> Iterator[Any]:
        """The sampler's indices from the first batch that was not delivered, drawn as they were drawn then."""
        held = self._held
        # Since ``begin`` the base class has drawn for this pass what was drawn for it before.
        held.restore(self._before)
        _restore_sampler(self._samplers, self._sampler)
        held.restore(self._saved.get("iter", {}))
        indices: Iterator[Any] = iter(self._samplers[0])
        held.restore(self._saved.get("next", {}))
        for _ in range(self.first_batch):
            next(indices, None)
        held.restore({name: state for name, state in self._before.items() if not name.startswith("own")})
        return indices

    def end(self) -> None:
        """The pass has ended: ``StopIteration`` was raised."""
        self._is_over = True

    def _state(self, loader: Any) -> dict[str, Any]:
        if self._is_over:
            return self._book._between(loader)
        next_batch, ahead = (self.first_batch, self.skip) if self.progress is None else self.progress()
        return {
            "epoch": self.epoch,
            "base_seed": self.base_seed,
            "next_batch": next_batch,
            "ahead": list(ahead),
            "is_midway": True,
            "start": {
                when: {name: _to_plain(state) for name, state in saved.items()} for when, saved in self._saved.items()
            },
            "sampler": copy.deepcopy(self._sampler),
        }


class _Held:
    """The global generators and those that the user gave to the loader or its samplers, by name."""

    def __init__(self, process: Generators, loader: Any) -> None:
        self._generators: dict[str, Any] = {stream.name: generator for stream, generator in process.entries}
        seen: list[Any] = [torch.default_generator]
        for owner in (loader, loader._index_sampler, getattr(loader._index_sampler, "sampler", None)):
            own: Any = getattr(owner, "generator", None)
            if hasattr(own, "get_state") and not any(own is other for other in seen):
                self._generators[f"own{len(seen)}"] = TorchState(own)
                seen.append(own)
        self.names = tuple(self._generators)

    def read(self) -> dict[str, object]:
        return {name: generator.state() for name, generator in self._generators.items()}

    def restore(self, states: dict[str, Any]) -> None:
        """Put back some; takes states as they were read or in their plain form."""
        for name, state in states.items():
            if name in self._generators:
                self._generators[name].restore(_from_plain(state))


# -- plain form -------------------------------------------------------------------------------------------------------


def _to_plain(state: Any) -> Any:
    """A generator's state as text and numbers."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(zlib.compress(state, 1)).decode()}
    if isinstance(state, tuple):
        return [_to_plain(part) for part in state]
    return state


def _from_plain(state: Any) -> Any:
    if isinstance(state, dict) and set(state) == {"bytes"}:
        return zlib.decompress(base64.b64decode(state["bytes"]))
    return tuple(_from_plain(part) for part in state) if isinstance(state, list) else state


# -- samplers ---------------------------------------------------------------------------------------------------------


def _len(loader: Any) -> int | None:
    try:
        return len(loader._index_sampler)
    except (TypeError, NotImplementedError):
        return None


def _samplers(loader: Any) -> list[Any]:
    """The sampler of batches and the one inside it, the outer one first."""
    outer = loader._index_sampler
    inner = getattr(outer, "sampler", None)
    return [outer] if inner is None else [outer, inner]


def _sampler_state(samplers: list[Any]) -> dict[str, Any] | None:
    """What a sampler says of itself: its own ``state_dict``, or the epoch that ``set_epoch`` has set."""
    for sampler in samplers:
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
            return {"state_dict": copy.deepcopy(sampler.state_dict())}
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
            return {"epoch": sampler.epoch}
    return None


def _restore_sampler(samplers: list[Any], state: dict[str, Any] | None) -> None:
    if not state:
        return
    for sampler in samplers:
        if "state_dict" in state and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(copy.deepcopy(state["state_dict"]))
            return
        if "epoch" in state and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(state["epoch"])
            return


def _check(state: Any, loader: Any) -> None:
    if not isinstance(state, dict) or not all(key in state for key in _KEYS):
        raise UsageError("this is no state of a headrace.Loader: load what its state_dict() returned")
    if state["headrace_loader"] > VERSION:
        raise UsageError(
            f"this state has format {state['headrace_loader']}, this headrace knows those up to {VERSION}: update it"
        )
    num_batches = _len(loader)
    if state["is_midway"] and None not in (num_batches, state["num_batches"]) and num_batches != state["num_batches"]:
        raise UsageError(
            f"this state is from the middle of a pass over {state['num_batches']} batches, and this loader has"
            f" {num_batches}: give it the same dataset, batch_size, drop_last and number of ranks, or begin a new pass"
        )
