"""One run, one folder: a lock file that names its owner, kept fresh while the owner lives."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

NAME = ".lock"
BEAT_SECONDS = 30.0  # how often an owner says that it lives
DEAD_SECONDS = 300.0  # an owner on another host that has been silent for so long is dead


class RunLock:
    """A run folder's lock, held from construction to ``release``; of a run's processes rank 0 alone holds it.

    An owner on this host is dead when its process is; one on another host when it has been silent for
    `DEAD_SECONDS`. A dead owner's lock is taken over.

    Raises:
        ValueError: another run holds the folder; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "began": _began(os.getpid()),
            "run": uuid.uuid4().hex[:8],
        }
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            if self._create():
                break
            other = _read(self.path)
            if other is not None and _alive(other, self.path):
                owner = f"run {other.get('run')} (process {other.get('pid')} on {other.get('host')})"
                raise ValueError(
                    f"{folder} is in use by {owner}; wait for it to end, stop it, or choose another folder with --out"
                )
            self.path.unlink(missing_ok=True)
        else:
            raise ValueError(f"{folder} is being taken by another run at this moment; try again")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the folder up, if it is still this run's."""
        self._stop.set()
        if _read(self.path) == self.owner:
            self.path.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Whether the lock was made: whole under its name at once, and by one process alone."""
        own = self.path.with_name(f"{NAME}.{self.owner['run']}")
        own.write_text(json.dumps(self.owner))
        try:
            os.link(own, self.path)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            if _read(self.path) == self.owner:
                os.utime(self.path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text())
        return owner if isinstance(owner, dict) else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def _alive(owner: dict[str, Any], path: Path) -> bool:
    if owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int):
        return _began(owner["pid"]) == owner.get("began") and _exists(owner["pid"])
    try:
        return time.time() - path.stat().st_mtime < DEAD_SECONDS
    except FileNotFoundError:
        return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _began(pid: int) -> str | None:
    """When a process began, which tells it from a later one of the same number; None where that cannot be told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
