"""Stands in the configuration of a trainer without ``reward_fn``, whose samples the user scores by hand. It is never called."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Nothing: with this file in the configuration no reward process is started."""
    raise NotImplementedError("this trainer has no reward function: samples are scored by TrainerBatch.with_scores")
