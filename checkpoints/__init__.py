"""Checkpoints that are complete or absent, and runs that go on from them. This package knows no model."""

from checkpoints.folders import latest, load, read_manifest, retire, save, steps, sweep, verify

__all__ = ["latest", "load", "read_manifest", "retire", "save", "steps", "sweep", "verify"]
