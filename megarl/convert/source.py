"""Under its old name until all have the new one."""

from megarl.config.safetensors_header import Entry
from megarl.weights.hf_headers import Scan, scan
from megarl.weights.hf_source import CODE_OF, CODES, Files, as_bytes, runs

__all__ = ["CODES", "CODE_OF", "Entry", "Files", "Scan", "as_bytes", "runs", "scan"]
