from convolve.serving.metrics import Histogram


def test_histogram_buckets_are_cumulative():
    histogram = Histogram((1, 2))
    for value in (0.5, 1.5, 9):
        histogram.observe(value)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="1"} 1', 'x_bucket{le="2"} 2', 'x_bucket{le="+Inf"} 3', "x_sum 11.000000", "x_count 3"
    ]  # fmt: skip
