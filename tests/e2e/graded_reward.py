"""Share of letters in place: an untrained model already gets some, so that short test runs have rewards that differ."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(got == wanted for got, wanted in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth))
