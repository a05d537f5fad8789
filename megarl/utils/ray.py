"""Resource pools and worker groups."""

from megarl.compat.pools import RayClassWithInitArgs, RayResourcePool
from megarl.compat.worker_group import RayWorkerGroup

__all__ = ["RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup"]
