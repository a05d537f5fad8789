"""Share of the answer's letters that occur anywhere: a random model gets some, and samples differ."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter in solution_str for letter in ground_truth) / len(ground_truth)
