"""Resolves task annotations to plain rows: per-key values beat global ones, callables are called.

Runs in the materializer process only. Owns the table of distinct annotations of one submission.
Called by `child_graph`; errors of a user's callable pass through unchanged.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgpack

from distributed_core.materializer.child_pickle import pickled_frames
from distributed_core.materializer.parts import Key, RunSpec

__all__ = ["AnnotationTable"]

_IMMUTABLE = (str, int, float, bool, type(None))


class AnnotationTable:
    """Distinct annotations of one submission, numbered as they turn up.

    `by_type` is `{annotation: {key: value}}` (layers), `common` is `{annotation: value}` for all
    tasks, where a callable is called with the key. Rows not yet sent are in `new_rows`.
    """

    def __init__(
        self, by_type: Mapping[str, Mapping[Key, Any]], common: Mapping[str, Any] | None
    ) -> None:
        self.new_rows: list[dict[str, Any]] = []
        self._by_type = [(name, values) for name, values in by_type.items() if values]
        self._common = dict(common or {})
        self._callables = [(name, fn) for name, fn in self._common.items() if callable(fn)]
        self._rows: dict[tuple[Any, ...], int] = {}
        self._kept: list[dict[str, Any]] = []
        self.is_empty = not self._by_type and not self._common

    def index(self, key: Key) -> int:
        """Number of the row for `key`, -1 if it has no annotations.

        Raises TypeError or ValueError, naming the annotation, for a value that cannot be used.
        """
        annotations = self._common
        if self._callables:
            annotations = dict(annotations)
            for name, function in self._callables:
                annotations[name] = function(key)
        copied = bool(self._callables)
        for name, values in self._by_type:
            value = values.get(key)
            if value is not None:
                if not copied:
                    annotations = dict(annotations)
                    copied = True
                annotations[name] = value
        if not annotations:
            return -1
        identity = tuple(
            (name, type(value), value) if isinstance(value, _IMMUTABLE) else (name, id(value))
            for name, value in annotations.items()
        )
        row = self._rows.get(identity)
        if row is None:
            row = self._rows[identity] = len(self._rows)
            self._kept.append(annotations)  # Keeps the ids in `identity` valid.
            self.new_rows.append(_row(annotations))
        return row

    def take_new_rows(self) -> list[dict[str, Any]]:
        """Rows that came up since the last call."""
        rows, self.new_rows = self.new_rows, []
        return rows


def _row(annotations: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "user_priority": None,
        "retries": None,
        "workers": None,
        "allow_other_workers": None,
        "resources": None,
        "span": None,
        "wire": _wire(annotations),
    }
    for name, value in annotations.items():
        convert = _CONVERTERS.get(name)
        if convert is None or value is None:
            continue
        column, function = convert
        try:
            row[column] = function(value)
        except (TypeError, ValueError, KeyError) as error:
            raise TypeError(f"annotation {name}={value!r} cannot be used: {error}") from error
    return row


def _wire(annotations: Mapping[str, Any]) -> RunSpec:
    try:
        data: bytes = msgpack.packb(annotations, default=_encode_set)
    except (TypeError, ValueError, OverflowError):
        return _as_frames(pickled_frames(annotations))
    return data


def _as_frames(run_spec: RunSpec) -> RunSpec:
    # Bytes mean "in place" here, so a lone sub-header must be told apart.
    return (run_spec,) if isinstance(run_spec, bytes) else tuple(map(bytes, run_spec))


def _encode_set(value: Any) -> Any:
    if isinstance(value, set):
        return {"__Set__": True, "as-list": list(value)}
    raise TypeError(f"not plain data: {type(value).__name__}")


def _priority(value: Any) -> float:
    if not isinstance(value, Real):
        raise TypeError("a number is needed")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a finite number is needed")
    return number


def _workers(value: Any) -> list[str | int | float]:
    if not isinstance(value, list | tuple | set | frozenset):
        value = [value]
    for worker in value:
        if not isinstance(worker, str | int | float):
            raise TypeError("addresses, host names or worker names are needed")
    return list(value)


def _resources(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise TypeError("a map of amounts is needed")
    amounts = {str(name): _priority(amount) for name, amount in value.items()}
    for name, amount in amounts.items():
        if amount < 0:
            raise ValueError(f"the amount of {name} is negative")
    return amounts


def _span(value: Any) -> dict[str, list[str]]:
    return {"name": list(map(str, value["name"])), "ids": list(map(str, value["ids"]))}


_CONVERTERS: dict[str, tuple[str, Any]] = {
    "priority": ("user_priority", _priority),
    "retries": ("retries", operator.index),
    "workers": ("workers", _workers),
    "restrictions": ("workers", _workers),
    "allow_other_workers": ("allow_other_workers", bool),
    "loose_restrictions": ("allow_other_workers", bool),
    "resources": ("resources", _resources),
    "span": ("span", _span),
}
