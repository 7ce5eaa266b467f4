"""What the benchmark scripts share: texts, the clock, contenders, scores, reports."""
