"""The end of a step for the batch norms of a single process."""

from convolve.layers.batch_norm import NormStatistics


def update_statistics(network):
    """Update the running statistics with the sums since the last step."""
    statistics = NormStatistics(network)
    statistics.update_running_stats(statistics.pending_sums)
