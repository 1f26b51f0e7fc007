"""Checkpoints that are complete or absent, and runs that go on from them. This package knows no model.

(Its conversion commands do: ``checkpoints.convert``, which nothing here imports.)
"""

from checkpoints.folders import (
    MANIFEST,
    ONE_FILE,
    assets,
    latest,
    load,
    load_model,
    newest_good,
    publish,
    read_manifest,
    retire,
    save,
    set_aside,
    steps,
    sweep,
    verify,
)
from checkpoints.lock import RunLock

__all__ = [
    "MANIFEST",
    "ONE_FILE",
    "RunLock",
    "assets",
    "latest",
    "load",
    "load_model",
    "newest_good",
    "publish",
    "read_manifest",
    "retire",
    "save",
    "set_aside",
    "steps",
    "sweep",
    "verify",
]
