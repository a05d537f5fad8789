"""Reward of the demo task, in verl's signature: 1 for the whole word spelled backward, else 0.

All or nothing on purpose. A graded score (the share of letters in place) reaches 0.4 while the policy has barely found the
rule, and lifting it from there by policy gradient took ten times as many samples in trials; 40 % of words whole means that
the rule is known and the policy is unsure of it, which is what PPO is good at. The graded figure is logged beside the score.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one answer.

    ``solution_str`` is the decoded response without special tokens, ``ground_truth`` the reversed word. Returns ``score``, 1.0
    or 0.0, and ``letters_right`` in [0, 1]: the letters that stand in their place, over the length of the longer of the two.
    """
    right = sum(got == wanted for got, wanted in zip(solution_str, ground_truth, strict=False))
    return {"score": float(solution_str == ground_truth), "letters_right": right / max(len(solution_str), len(ground_truth))}
