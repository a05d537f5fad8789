"""Reward of the demo task, in verl's signature: 1 for the whole word spelled backward, else 0.

All or nothing on purpose. The share of letters in place reaches 0.4 while the policy has barely found the rule: in a trial PPO
lifted 0.39 to 0.49 in 60 steps. With 0.4 of the words whole the rule is known and the policy is only unsure of it, which is what
PPO is good at: 0.39 became 0.62 in 50 steps. The share of letters is returned beside the score.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one answer.

    ``solution_str`` is the decoded response without special tokens, ``ground_truth`` the reversed word. Returns ``score``, 1.0
    or 0.0, and ``letters_right`` in [0, 1]: the letters that stand in their place, over the length of the longer of the two.
    """
    right = sum(got == wanted for got, wanted in zip(solution_str, ground_truth, strict=False))
    return {"score": float(solution_str == ground_truth), "letters_right": right / max(len(solution_str), len(ground_truth))}
