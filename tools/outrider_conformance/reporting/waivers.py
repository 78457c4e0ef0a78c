"""Waivers: known failures with a reason, a link to an issue and an expiry date."""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from outrider.cli.terminal.files import read_utf8
from outrider.device import ConfigError

_KEYS = ("test", "reason", "link", "expires")


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiver:
    """One known failure of a test, accepted until a date."""

    test: str
    """Id of the test as the report prints it; ``*`` and ``?`` match as in file names."""
    reason: str
    link: str
    expires: datetime.date

    def covers(self, test: str) -> bool:
        """Return whether the waiver covers the test with this id."""
        return fnmatchcase(test.replace("[", "("), self.test.replace("[", "("))  # brackets aren't wildcards here

    def expired(self, today: datetime.date) -> bool:
        """Return whether the waiver's last valid day is before ``today``."""
        return today > self.expires

    def as_dict(self) -> dict[str, str]:
        """Return the waiver as plain data for the report."""
        return {"test": self.test, "reason": self.reason, "link": self.link, "expires": self.expires.isoformat()}


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Return the waivers of a TOML file with tables ``[[waiver]]`` of ``test``, ``reason``, ``link`` and ``expires``.

    Raises :class:`ConfigError` for an unreadable file, and for a waiver with missing or unknown keys.
    """
    try:
        data = tomllib.loads(read_utf8(path, "waivers"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"waivers {path}: not TOML: {error}") from error
    unknown = sorted(set(data) - {"waiver"})
    if unknown or not isinstance(data.get("waiver", []), list):
        raise ConfigError(f"waivers {path}: expected tables [[waiver]] and nothing else, found {unknown}")
    return tuple(_waiver(path, number, entry) for number, entry in enumerate(data.get("waiver", []), 1))


def _waiver(path: Path, number: int, entry: dict[str, object]) -> Waiver:
    where = f"waivers {path}, waiver {number}"
    wrong = sorted(set(entry) ^ set(_KEYS))
    if wrong:
        raise ConfigError(f"{where}: {wrong} missing or unknown; a waiver has {', '.join(_KEYS)}")
    expires = entry["expires"]
    if isinstance(expires, str):
        try:
            expires = datetime.date.fromisoformat(expires)
        except ValueError:
            raise ConfigError(f"{where}: expires is {expires!r}; expected a date such as 2027-01-31") from None
    if not isinstance(expires, datetime.date):
        raise ConfigError(f"{where}: expires is {expires!r}; expected a date such as 2027-01-31")
    test, reason, link = (str(entry[key]).strip() for key in ("test", "reason", "link"))
    if not test or not reason:
        raise ConfigError(f"{where}: test and reason must say something")
    if not link.startswith(("https://", "http://")):
        raise ConfigError(f"{where}: link is {link!r}; expected the address of the issue that tracks it")
    return Waiver(test=test, reason=reason, link=link, expires=expires)
