"""Checkpoints that are complete or absent, and runs that go on from them. This package knows no model.

(Its conversion commands do: ``checkpoints.convert``, which nothing here imports.)
"""

from checkpoints.folders import (
    MANIFEST,
    assets,
    latest,
    load,
    load_model,
    publish,
    read_manifest,
    retire,
    save,
    steps,
    sweep,
    verify,
)

__all__ = [
    "MANIFEST",
    "assets",
    "latest",
    "load",
    "load_model",
    "publish",
    "read_manifest",
    "retire",
    "save",
    "steps",
    "sweep",
    "verify",
]
