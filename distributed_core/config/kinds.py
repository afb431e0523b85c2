"""What a setting may hold: one small class per kind of value.

Owns parsing of one value, its description for the reference page and its canonical spelling.
Never knows a setting's name or where a value came from: the loader adds both to the message.
Called by ``schema`` (declarations), ``loader``, ``report`` and ``reference``.
"""

import logging
import math
import os
import re
from collections.abc import Sequence

from distributed_core.config import units

__all__ = [
    "Boolean",
    "Bytes",
    "Choice",
    "DashboardAddress",
    "Duration",
    "FilePath",
    "Integer",
    "IntegerList",
    "Kind",
    "LogFormat",
    "MappingOf",
    "Number",
    "Optional",
    "PathPrefix",
    "Pem",
    "Ports",
    "Rate",
    "Text",
    "TextList",
    "describe_pem",
]

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NOTHING = frozenset({"", "null", "none", "~"})
_PLAIN_SCALAR = re.compile(r"[A-Za-z/][A-Za-z0-9_./+-]*")


class Kind:
    """One kind of value. ``parse`` raises ValueError with a message that needs no context."""

    description: str = ""

    def parse(self, raw: object) -> object:
        """Return the parsed value of what YAML, the environment or a flag gave."""
        raise NotImplementedError

    def show(self, value: object) -> str:
        """Return ``value`` as one line of YAML which ``parse`` reads back as the same value."""
        return str(value)


class Text(Kind):
    """A line of text without blanks at its ends."""

    def __init__(self, pattern: str | None = None, what: str = "text") -> None:
        self.description = what
        self._pattern = re.compile(pattern) if pattern is not None else None

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        text = raw.strip()
        if not text.isprintable() or (self._pattern and not self._pattern.fullmatch(text)):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return text

    def show(self, value: object) -> str:
        return _quote(str(value))


class LogFormat(Text):
    """A format of ``logging`` in percent style."""

    def __init__(self) -> None:
        super().__init__(what="a log format like %(levelname)s - %(message)s")

    def parse(self, raw: object) -> str:
        text = super().parse(raw)
        sample = logging.LogRecord("name", logging.INFO, "path", 1, "message", (), None)
        try:
            logging.Formatter(text).format(sample)
        except ValueError as exc:
            raise ValueError(f"expected {self.description}, got {raw!r}: {exc}") from None
        return text


class FilePath(Text):
    """A path; ``~`` is the home directory, a relative path starts at the working directory."""

    def __init__(self) -> None:
        super().__init__(what="a path")

    def parse(self, raw: object) -> str:
        return os.path.expanduser(super().parse(raw))


class Pem(Kind):
    """A path of a PEM file, or the PEM text itself, which is never shown."""

    description = "a path of a PEM file, or PEM text"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str):
            # The value may be a secret that is badly quoted, so it is not repeated.
            raise ValueError(f"expected {self.description}, got {type(raw).__name__}")
        if "\n" in raw:
            if "-----BEGIN " not in raw:
                raise ValueError("expected PEM text, got several lines without a BEGIN mark")
            return raw
        if not raw.strip().isprintable():
            raise ValueError(f"expected {self.description}, got text with control characters")
        return os.path.expanduser(raw.strip())

    def show(self, value: object) -> str:
        return _quote(describe_pem(str(value)))


class Boolean(Kind):
    """True or false."""

    description = "true or false"

    def parse(self, raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        word = str(raw).strip().lower() if isinstance(raw, str | int) else ""
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise ValueError(f"expected true or false, got {raw!r}")

    def show(self, value: object) -> str:
        return "true" if value else "false"


class Integer(Kind):
    """A whole number within bounds, both included."""

    def __init__(self, minimum: int = 0, maximum: int | None = None) -> None:
        self._minimum = minimum
        self._maximum = maximum
        bounds = f"from {minimum}" + ("" if maximum is None else f" to {maximum}")
        self.description = f"a whole number {bounds}"

    def parse(self, raw: object) -> int:
        value: object = raw
        if isinstance(raw, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", raw):
            value = int(raw)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        if value < self._minimum or (self._maximum is not None and value > self._maximum):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return value


class Number(Kind):
    """A fraction from 0 to 1, or (``ratio``) any number above 0 and ``inf``."""

    def __init__(self, *, ratio: bool = False) -> None:
        self._ratio = ratio
        self.description = "a number above 0, or inf" if ratio else "a number from 0 to 1"

    def parse(self, raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        try:
            value = float(raw.strip().removeprefix(".") if raw == ".inf" else raw)
        except (ValueError, OverflowError):
            raise ValueError(f"expected {self.description}, got {raw!r}") from None
        if not (value > 0 if self._ratio else 0 <= value <= 1):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return value

    def show(self, value: object) -> str:
        return ".inf" if value == math.inf else str(value)


class Bytes(Kind):
    """A size, held in bytes."""

    def __init__(self, minimum: int = 0) -> None:
        self._minimum = minimum
        self.description = "a size like 64KiB or 100 MB"
        if minimum:
            self.description += f", at least {units.format_bytes(minimum)}"

    def parse(self, raw: object) -> int:
        value = units.parse_bytes(raw)
        if value < self._minimum:
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return value

    def show(self, value: object) -> str:
        assert isinstance(value, int)
        return units.format_bytes(value)


class Rate(Kind):
    """Bytes per second."""

    description = "a rate like 100 MB/s"

    def parse(self, raw: object) -> int:
        return units.parse_rate(raw)

    def show(self, value: object) -> str:
        assert isinstance(value, int)
        return units.format_bytes(value) + "/s"


class Duration(Kind):
    """A span of time, held in seconds."""

    def __init__(self, *, above_zero: bool = False) -> None:
        self._above_zero = above_zero
        self.description = "a duration like 500ms, 5 minutes or 1h"
        if above_zero:
            self.description += ", above zero"

    def parse(self, raw: object) -> float:
        value = units.parse_duration(raw)
        if self._above_zero and value == 0:
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return value

    def show(self, value: object) -> str:
        assert isinstance(value, int | float)
        return units.format_duration(value)


class Choice(Kind):
    """One word of a list."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self.description = "one of " + ", ".join(words)

    def parse(self, raw: object) -> str:
        # YAML reads a bare `off` as false and `1.2` as a number; both are meant as words here.
        word = {True: "on", False: "off"}[raw] if isinstance(raw, bool) else str(raw)
        word = word.strip().lower()
        if word not in self._words:
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return word

    def show(self, value: object) -> str:
        return f'"{value}"' if value in _FALSE | _TRUE else str(value)


class Optional(Kind):
    """Another kind, or null; ``off_at_zero`` reads a zero as null, as Dask does for timeouts."""

    def __init__(self, kind: Kind, *, off_at_zero: bool = False) -> None:
        self.kind = kind
        self._off_at_zero = off_at_zero
        self.description = kind.description + (", or 0 or null" if off_at_zero else ", or null")

    def parse(self, raw: object) -> object:
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in _NOTHING):
            return None
        value = self.kind.parse(raw)
        return None if self._off_at_zero and not value else value

    def show(self, value: object) -> str:
        return "null" if value is None else self.kind.show(value)


class TextList(Kind):
    """Several words: a list, or text with commas."""

    def __init__(self, what: str = "a list of words") -> None:
        self.description = what + ", or text with commas"

    def parse(self, raw: object) -> tuple[str, ...]:
        words = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        stripped = tuple(word.strip() for word in words)
        if isinstance(raw, str) and not raw.strip():
            return ()
        if not all(word and word.isprintable() for word in stripped):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return stripped

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return "[" + ", ".join(_quote(word) for word in value) + "]"


class IntegerList(Kind):
    """A fixed count of whole numbers."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._item = Integer()
        self.description = f"a list of {count} whole numbers"

    def parse(self, raw: object) -> tuple[int, ...]:
        items = raw.strip("[] ").split(",") if isinstance(raw, str) else raw
        if not isinstance(items, Sequence) or len(items) != self._count:
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return tuple(self._item.parse(item) for item in items)

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return "[" + ", ".join(map(str, value)) + "]"


class Ports(Kind):
    """A port or several: a number, a list, or text with commas."""

    description = "a port from 0 to 65535, or a list of them"

    def __init__(self) -> None:
        self._item = Integer(0, 65535)

    def parse(self, raw: object) -> tuple[int, ...]:
        items: Sequence[object]
        if isinstance(raw, str):
            items = raw.strip("[] ").split(",")
        else:
            items = raw if isinstance(raw, list | tuple) else (raw,)
        try:
            ports = tuple(self._item.parse(item) for item in items)
        except ValueError:
            ports = ()
        if not ports:
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return ports

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        return str(value[0]) if len(value) == 1 else "[" + ", ".join(map(str, value)) + "]"


class DashboardAddress(Kind):
    """Where HTTP listens; held as pairs of host (empty: not said) and port (0: any free one)."""

    description = "a port, host:port or :port, or several with commas"

    def parse(self, raw: object) -> tuple[tuple[str, int], ...]:
        parts = raw if isinstance(raw, list | tuple) else str(raw).split(",")
        if not parts:
            raise ValueError(f"expected {self.description}, got {raw!r}")
        return tuple(self._parse_one(part, raw) for part in parts)

    def _parse_one(self, part: object, raw: object) -> tuple[str, int]:
        text = str(part).strip()
        if isinstance(part, bool) or not isinstance(part, int | str) or not text:
            raise ValueError(f"expected {self.description}, got {raw!r}")
        if text.isdigit():
            host, port = "", text
        elif text.startswith("["):
            host, _, rest = text[1:].partition("]")
            port = rest.removeprefix(":") or "0"
        elif ":" in text:
            host, _, port = text.rpartition(":")
        else:
            host, port = text, "0"
        if not re.fullmatch(r"[\w.:%-]*", host, re.ASCII):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
            raise ValueError(f"expected {self.description}, got {raw!r}")
        if ":" in host and not text.startswith("["):
            raise ValueError(f"an IPv6 address needs brackets like [::1]:8787, got {raw!r}")
        return host, int(port)

    def show(self, value: object) -> str:
        assert isinstance(value, tuple)
        shown = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in value)
        return '"' + ",".join(shown) + '"'


class PathPrefix(Text):
    """The first part of every HTTP path; held as empty or with a leading slash."""

    def __init__(self) -> None:
        super().__init__(r"[A-Za-z0-9_.~/-]*", "a path prefix, or nothing")

    def parse(self, raw: object) -> str:
        stripped = super().parse("" if raw is None else raw).strip("/")
        return "/" + stripped if stripped else ""

    def show(self, value: object) -> str:
        return f'"{value}"'


class MappingOf(Kind):
    """Names with a value each; entries of several sources are merged name by name."""

    def __init__(self, item: Kind, what: str) -> None:
        self.item = item
        self.description = f"a mapping from {what} to {item.description}"

    def parse(self, raw: object) -> dict[str, object]:
        if not isinstance(raw, dict):
            raise ValueError(f"expected {self.description}, got {raw!r}")
        parsed: dict[str, object] = {}
        for name, value in raw.items():
            if not isinstance(name, str) or not name.isprintable():
                raise ValueError(f"expected a name, got {name!r}")
            try:
                parsed[name] = self.item.parse(value)
            except ValueError as exc:
                raise ValueError(f"{name}: {exc}") from None
        return parsed

    def show(self, value: object) -> str:
        assert isinstance(value, dict)
        inside = (f"{_quote(name)}: {self.item.show(item)}" for name, item in value.items())
        return "{" + ", ".join(inside) + "}"


def describe_pem(value: str) -> str:
    """Return ``value`` if it is a path; of PEM text only its length."""
    return f"(PEM text, {len(value)} characters)" if "\n" in value else value


def _quote(text: str) -> str:
    """Return ``text`` as a YAML scalar that is read back as the same text."""
    if _PLAIN_SCALAR.fullmatch(text) and text.lower() not in _NOTHING | _TRUE | _FALSE:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
