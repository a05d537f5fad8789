"""Reward of the demo task, in verl's signature: how much of the reversed word stands in its place.

Graded and not all-or-nothing: a policy that gets 40 % of the letters right spells hardly any word whole, so that exact
match starts near 0 and tells a group of wrong answers apart no better than noise. The share of right letters rises
smoothly from the warm start on, and equals 1 exactly when the whole answer is right. ``exact_match`` is reported beside it.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one answer.

    ``solution_str`` is the decoded response without special tokens, ``ground_truth`` the reversed word. Returns ``score`` in
    [0, 1]: the letters that stand at their place, over the length of the longer of the two, so that a letter too many or too
    few costs as much as a wrong one; and ``exact_match``, 0 or 1.
    """
    right = sum(got == wanted for got, wanted in zip(solution_str, ground_truth, strict=False))
    return {"score": right / max(len(solution_str), len(ground_truth)), "exact_match": float(solution_str == ground_truth)}
