"""The end of a step, for the batch norms of a process that is alone."""

from convolve.layers.batch_norm import NormStatistics


def update_statistics(network):
    """Move the running statistics by what was seen since the last step."""
    statistics = NormStatistics(network)
    statistics.update_running_stats(statistics.pending_sums)
