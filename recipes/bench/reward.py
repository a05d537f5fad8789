"""Reward of the benchmark workloads, in verl's signature: noise that the response alone decides, so that advantages differ."""

import hashlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one answer with a number in [0, 1); the same text has the same score in every process and run."""
    return int.from_bytes(hashlib.sha256(solution_str.encode()).digest()[:6], "big") / 2**48
