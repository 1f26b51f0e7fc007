"""How the model is laid over a mesh of devices."""

from parallel.layout import Layout, check_precision, choose_layout
from parallel.parallelize import parallelize, plain, write_shard

__all__ = ["Layout", "check_precision", "choose_layout", "parallelize", "plain", "write_shard"]
